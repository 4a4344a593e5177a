import pytest

from workbench.diagnose.scaling import (
    HALVES_FOR_EVER,
    SCALE_LOST,
    SKIPS_TOO_OFTEN,
    ScaleRecord,
    ScaleWatch,
    judge_scaling,
)
from workbench.errors import Refused


def scaler(
    steps: int, limit: float, *, init: float = 2.0**16, interval: int = 100, start: int = 0
) -> list[ScaleRecord]:
    """A dynamic scaler's history over gradients that overflow above ``limit``."""
    scale, good, history = init, 0, []
    for step in range(start, start + steps):
        skipped = scale > limit
        history.append(ScaleRecord(step, scale, skipped, layer="blocks.3.mlp" if skipped else "", rank=1))
        scale, good = (scale / 2, 0) if skipped else (scale, good + 1)
        if good == interval:
            scale, good = scale * 2, 0
    return history


def faults(records: list[ScaleRecord], **constants: float) -> list[str]:
    return [symptom.fault for symptom in judge_scaling(records, **constants)]


@pytest.mark.parametrize("limit", [2.0**20, 2.0**12, 2.0**3, 1.0])
@pytest.mark.parametrize("interval", [20, 100, 2000])
def test_calibration_and_growth_are_quiet(limit: float, interval: int) -> None:
    assert faults(scaler(3000, limit, interval=interval), interval=interval) == []


def test_a_scale_that_halves_for_ever_stops_at_the_floor_and_names_layer_and_rank() -> None:
    watch = ScaleWatch(floor=1.0, interval=100)
    for record in scaler(60, 0.0):
        watch.observe(record)
        if watch.stop:
            break
    (symptom,) = watch.symptoms
    assert symptom.fault == HALVES_FOR_EVER and symptom.step == 16
    assert (symptom.where, symptom.rank) == ("blocks.3.mlp", 1) and "floor" in symptom.detail


def test_halving_after_training_was_under_way_stops_before_the_floor() -> None:
    good = scaler(50, 2.0**14)
    found = judge_scaling([*good, *scaler(20, 0.0, init=good[-1].scale, start=50)])
    assert [s.fault for s in found] == [HALVES_FOR_EVER] and found[0].step == 57


def test_a_resume_without_the_scalers_state_is_seen() -> None:
    before = scaler(50, 2.0**10)
    lost = judge_scaling([*before, *scaler(50, 2.0**10, start=50)])
    assert [(s.fault, s.step) for s in lost] == [(SCALE_LOST, 50)]
    assert judge_scaling([*before, *scaler(50, 2.0**10, init=before[-1].scale, start=50)]) == []


def test_skips_beyond_what_growth_explains_are_reported() -> None:
    history = [ScaleRecord(s, 2.0**10, skipped=s % 20 == 0) for s in range(1, 3000)]
    assert faults(history, interval=200) == [SKIPS_TOO_OFTEN]
    assert faults(history, interval=20) == []


def test_the_tolerance_of_a_hysteresis_is_no_halving_for_ever() -> None:
    history = [ScaleRecord(0, 2.0**10, False), *(ScaleRecord(s, 2.0**10, True) for s in range(1, 10))]
    assert faults(history) == [HALVES_FOR_EVER]
    assert faults(history, hysteresis=4) == []


def test_senseless_constants_are_refused() -> None:
    with pytest.raises(Refused):
        ScaleWatch(floor=0)
