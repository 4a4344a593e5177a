import pytest

from workbench.errors import Refused
from workbench.experiment import Guard, Protocol
from workbench.trainer.config import TrainConfig


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrainConfig(global_batch=0), "global_batch of TrainConfig: 0"),
        (lambda: TrainConfig(learning_rate=float("nan")), "learning_rate of TrainConfig: nan"),
        (lambda: TrainConfig(precison="bf16"), "did you mean 'precision'"),  # type: ignore[call-arg]
        (lambda: TrainConfig(micro_batch=65), "micro_batch 65 exceeds global_batch 64"),
        (lambda: TrainConfig(model_args={"num_classes": 3}), "num_classes"),
        (lambda: Guard(seeds=1), "seeds of Guard: 1"),
        (lambda: Protocol(max_rounds=-3), "max_rounds of Protocol: -3"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(make: object, said: str) -> None:
    with pytest.raises(Refused, match=said):
        make()  # type: ignore[operator]


def test_values_survive_a_round_trip_and_a_copy() -> None:
    config = TrainConfig(precision="fp16", loss_scaling={"interval": 3})  # type: ignore[arg-type]
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    assert config.model_copy(update={"seed": 4}).loss_scaling.interval == 3
