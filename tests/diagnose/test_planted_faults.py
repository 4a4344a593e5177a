"""Every fault of mixed-precision training, planted and found, beside controls that stay quiet."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.diagnose import planted
from tests.diagnose.ranks import run_ranks
from workbench.diagnose import audit, checks, scaling
from workbench.diagnose.symptom import Symptom

IN_LOOP = {
    "clip before unscale": audit.CLIP_BEFORE_UNSCALE,
    "negative max_norm": audit.REVERSED,
    "infinite batch into BatchNorm": audit.BATCHNORM,
    "double optimizer step": audit.DOUBLE_STEP,
    "one long autocast block": audit.STALE_CACHE,
    "schedule on skipped step": audit.SCHEDULE,
    "resume without scaler state": scaling.SCALE_LOST,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("plant", IN_LOOP)
def test_a_fault_in_the_loop_is_found_and_nothing_else(plant: str, optimizer: str) -> None:
    found = planted.loop(plant, optimizer=optimizer)
    assert {symptom.fault for symptom in found} == {IN_LOOP[plant]}, "\n".join(map(str, found))


@pytest.mark.parametrize("half", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("seed", range(12))
def test_the_healthy_loop_is_quiet(half: bool, seed: int) -> None:
    assert planted.loop(half=half, optimizer="sgd" if seed % 2 else "adamw", seed=seed) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_healthy_loop_did_skip_steps() -> None:
    """Else its silence about calibration would say nothing."""
    found = planted.loop("schedule on skipped step")
    assert len({symptom.step for symptom in found}) >= 2


def test_a_spoilt_batchnorm_is_named_at_the_step_of_the_batch() -> None:
    (found,) = planted.loop("infinite batch into BatchNorm")
    assert (found.where, found.step) == ("bn", planted.LATE)


SINGLE: dict[str, tuple[Callable[[bool], list[Symptom]], str]] = {
    "one infinite gradient, then clipping": (planted.infinite_gradient, audit.NONFINITE_CLIP),
    "loss scale halves for ever": (planted.endless_overflow, scaling.HALVES_FOR_EVER),
    "mean of means over uneven micro-batches": (planted.uneven_micro_batches, checks.MEAN_OF_MEANS),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_fault_of_its_own_is_found_and_its_control_is_quiet(name: str) -> None:
    run, fault = SINGLE[name]
    assert [symptom.fault for symptom in run(True)] == [fault]
    assert run(False) == []


def test_the_layer_that_overflows_for_ever_is_named() -> None:
    (found,) = planted.endless_overflow(True)
    assert found.where == "2" and found.rank == 0 and "floor" in found.detail


def test_an_infinite_gradient_is_named_by_its_parameter() -> None:
    (found,) = planted.infinite_gradient(True)
    assert (found.where, found.step) == ("0.bias", 1)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(planted.on_ranks)


def test_no_sync_around_the_backward_only_is_found(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        symptoms, differed = result["no_sync True"]
        assert {s.fault for s in symptoms} == {audit.NO_SYNC} and not differed
        healthy, differed = result["no_sync False"]
        assert healthy == [] and differed


def test_the_norm_of_one_shard_is_found(two_ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(two_ranks):
        (symptom,) = result["norm True"]
        assert symptom.fault == checks.SHARDED_NORM and symptom.rank == rank
        assert result["norm False"] == []
