"""The planted explosion of notebook 07 and its healthy control, trained as their arms train them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.experiment.test_tasks import FACTS
from workbench.errors import Refused
from workbench.experiment.finding import ArmResult, ArmStatus
from workbench.experiment.recording_task import ExplosionTask
from workbench.experiment.stability import LayerRecords, layer_records
from workbench.experiment.tasks import TrainTask
from workbench.models.resnet import ResNet, badly_initialised
from workbench.trainer.config import LossScaling, TrainConfig
from workbench.trainer.loop import Diverged

EPOCH = 1437 // 32
PLANTED = TrainConfig(
    model="workbench.models.resnet:badly_initialised",
    model_args={"gain": 12200.0},
    device="cpu",
    global_batch=32,
    precision="fp16",
    precision_rules={"default": "fp32", "layer4.conv1": "fp16"},
    loss_scaling=LossScaling(init=128.0),
    optimizer="sgd",
    learning_rate=0.5,
    weight_decay=0.0,
    clip_norm=None,
    warmup_steps=3 * EPOCH,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def guard_run(config: TrainConfig, steps: int, task: type[TrainTask] = ExplosionTask) -> ArmResult:
    """One arm's result as a finding's JSON holds it, from what its process said step by step."""
    said: dict[str, list[float]] = {}

    def on_step(step: int, **values: float) -> None:
        for name, value in values.items():
            said.setdefault(name, []).append(value)

    status: ArmStatus = "completed"
    try:
        task(config, FACTS).guard_run(0, steps, on_step)
    except Diverged:
        status = "diverged"
    arm = ArmResult(name="arm", status=status, trajectories=said)
    return ArmResult.model_validate_json(arm.model_dump_json())


@pytest.fixture(scope="module")
def planted() -> ArmResult:
    return guard_run(PLANTED, 4 * EPOCH)


@pytest.fixture(scope="module")
def healthy() -> ArmResult:
    return guard_run(PLANTED.model_copy(update={"model_args": {"gain": 1.0}}), 3 * EPOCH)


def test_the_planted_run_goes_non_finite_in_its_third_epoch_by_itself(planted: ArmResult) -> None:
    first = layer_records(planted).first_nonfinite
    assert planted.status == "diverged"
    assert first is not None and 2 * EPOCH <= first < 3 * EPOCH


def test_the_explosion_is_traced_to_the_layer_where_it_began_and_not_to_where_it_surfaced(planted: ArmResult) -> None:
    records = layer_records(planted)
    found = records.explosion()
    assert found is not None
    assert (found.layer, found.began) == ("layer4.conv1", 0)
    assert found.surfaced >= 2 * EPOCH
    # Every layer is NaN where it surfaced: that step alone accuses nobody.
    assert not torch.tensor(records.norm[found.surfaced]).isfinite().any()


def test_loss_scaling_skips_its_way_to_the_floor_without_helping(planted: ArmResult) -> None:
    records = layer_records(planted)
    assert records.skipped is not None and records.loss_scale is not None
    assert records.skipped.sum() == 8 and records.loss_scale[-1] == 1.0  # from 2^7


def test_the_healthy_control_alarms_nothing(healthy: ArmResult) -> None:
    records = layer_records(healthy)
    assert healthy.status == "completed" and len(records.loss) == 3 * EPOCH
    assert records.first_nonfinite is None and records.explosion() is None


def test_skips_of_a_run_that_recovered_are_no_explosion(planted: ArmResult) -> None:
    went_on = LayerRecords(**{**vars(layer_records(planted)), "diverged": False})
    assert went_on.explosion() is None


def test_only_the_first_guard_run_records_layers() -> None:
    task = ExplosionTask(PLANTED, FACTS)
    heard: list[set[str]] = []
    first, second = (task.guard_run(seed, 2, lambda step, **values: heard.append(set(values))) for seed in (0, 1))
    assert "gradient/layer4.conv1" in first.trajectories and "weight/fc" in first.trajectories
    assert set(second.trajectories) == {"loss", "grad_norm", "loss_scale", "skipped"}
    assert heard == [set(first.trajectories)] * 2 + [set(second.trajectories)] * 2
    json.dumps(first._asdict())


def test_the_plant_changes_one_layer_and_nothing_else() -> None:
    shape: dict[str, Any] = {"num_classes": 10, "in_channels": 1, "image_size": 8, "width": 4}
    torch.manual_seed(0)
    sound = ResNet(**shape).state_dict()
    torch.manual_seed(0)
    bad = badly_initialised(**shape, gain=3.0).state_dict()
    assert [name for name in sound if not torch.equal(sound[name], bad[name])] == ["layer4.conv1.weight"]
    assert torch.equal(bad["layer4.conv1.weight"], 3 * sound["layer4.conv1.weight"])


def test_an_arm_that_recorded_no_layers_is_refused() -> None:
    with pytest.raises(Refused, match="gradient/… of arm 'plain'"):
        layer_records(ArmResult(name="plain", trajectories={"loss": [1.0]}))
