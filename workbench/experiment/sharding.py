"""The arms of the sharding stage: one parallel plan each, on ranks of their own. Imports no torch."""

from typing import Literal

from workbench.experiment.ablation import Arm
from workbench.parallel.plan import named_plan
from workbench.parallel.rules import check

SHARDING_TASK = "workbench.experiment.sharding_task:ShardingTask"


def sharding_arms(names: list[str], world: int, *, param_dtype: Literal["fp32", "bf16"] = "fp32") -> list[Arm]:
    """An arm for each named plan, in the order given, all in one dtype.

    Raises:
        Refused: an unknown plan, or one that does not fit the world.
    """
    arms = []
    for name in names:
        plan = named_plan(name, world).model_copy(update={"param_dtype": param_dtype})
        check(plan, world)
        arms.append(Arm(name=name, settings={"parallel": plan.model_dump(mode="json")}, task=SHARDING_TASK))
    return arms
