import pytest

from workbench.errors import Refused
from workbench.experiment.precision_arms import SETTINGS, precision_arms
from workbench.hardware.facts import DeviceFacts
from workbench.trainer.config import TrainConfig

CPU = DeviceFacts.model_construct(kind="cpu", name="a CPU", peak_flops={"fp32": 1e11})


def test_arms_that_a_device_cannot_run_say_why() -> None:
    arms = {arm.name: arm.unavailable for arm in precision_arms(list(SETTINGS), CPU)}
    assert "NVIDIA" in arms["tf32"] and "fp8" in arms["fp8"]
    assert not any(arms[name] for name in arms if name not in ("tf32", "fp8"))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_arm_is_a_valid_configuration(name: str) -> None:
    TrainConfig(**SETTINGS[name])


def test_an_unknown_arm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(Refused, match="bf16"):
        precision_arms(["fp32", "bf61"], CPU)
