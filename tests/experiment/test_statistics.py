import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.experiment import Protocol
from workbench.experiment.statistics import (
    equivalence,
    log_ratio_interval,
    look_confidence,
    look_rounds,
    precise_enough,
)

SIGMA = 0.08
"""Of the log-ratio of neighbouring blocks on shared cores."""
ROUNDS = Protocol().max_rounds


def _rounds(rng: np.random.Generator, effect: float, sigma: float = SIGMA) -> np.ndarray:
    return math.log1p(effect) + rng.normal(0, sigma, ROUNDS)


def _verdict(ratios: np.ndarray) -> tuple[bool, int]:
    """Run the sequential rule on made-up rounds; whether it called the arms different, and after how many rounds."""
    rounds = next((n for n in look_rounds(ROUNDS) if precise_enough(ratios[:n], 0.95, 0.05)), ROUNDS)
    interval = log_ratio_interval(ratios[:rounds], look_confidence(0.95))
    return not interval.low <= 1 <= interval.high, rounds


def test_equal_arms_are_called_different_in_at_most_five_percent() -> None:
    rng = np.random.default_rng(0)
    assert np.mean([_verdict(_rounds(rng, 0.0))[0] for _ in range(2000)]) <= 0.05


@pytest.mark.parametrize("sigma", [0.02, SIGMA])
def test_a_ten_percent_difference_is_found(sigma: float) -> None:
    rng = np.random.default_rng(1)
    assert np.mean([_verdict(_rounds(rng, -0.10, sigma))[0] for _ in range(1000)]) >= 0.97


def test_drift_over_rounds_does_not_make_a_difference() -> None:
    """Arms take turns A B B A, so a machine that slows down steadily slows both."""
    rng = np.random.default_rng(2)
    slow_down = np.exp(np.linspace(0, 1, 48))
    order = [(2 * r, 2 * r + 1) if r % 2 else (2 * r + 1, 2 * r) for r in range(24)]
    wrong = 0
    for _ in range(500):
        times = slow_down * np.exp(rng.normal(0, SIGMA / math.sqrt(2), 48))
        interval = log_ratio_interval([math.log(times[b] / times[a]) for a, b in order], look_confidence(0.95))
        wrong += not interval.low <= 1 <= interval.high
    assert wrong / 500 <= 0.05


@pytest.mark.parametrize(("effect", "least", "most"), [(0.0, 0.0, 0.05), (-0.10, 0.97, 1.0)], ids=["equal", "slower"])
def test_noise_that_remembers_neither_makes_nor_hides_a_difference(effect: float, least: float, most: float) -> None:
    """A machine whose speed wanders by 20 % but slowly, under each block's own noise; A B B A as the arms take turns."""
    rng, memory, wander, runs = np.random.default_rng(6), 0.95, 0.2, 1000
    mood_RS = rng.normal(0, wander, (runs, 2 * ROUNDS))
    for slot in range(1, 2 * ROUNDS):
        mood_RS[:, slot] = memory * mood_RS[:, slot - 1] + math.sqrt(1 - memory**2) * mood_RS[:, slot]
    times_RNA = (mood_RS + rng.normal(0, SIGMA / math.sqrt(2), (runs, 2 * ROUNDS))).reshape(runs, ROUNDS, 2)
    sign_N = np.where(np.arange(ROUNDS) % 2, -1.0, 1.0)
    log_ratios_RN = sign_N * (times_RNA[:, :, 0] - times_RNA[:, :, 1]) + math.log1p(effect)
    called = np.mean([_verdict(ratios)[0] for ratios in log_ratios_RN])
    assert least <= called <= most


def test_a_quiet_machine_stops_at_the_first_look_and_a_noisy_one_goes_on() -> None:
    rng = np.random.default_rng(7)
    assert _verdict(_rounds(rng, 0.0, sigma=0.01))[1] == look_rounds(ROUNDS)[0]
    assert _verdict(_rounds(rng, 0.0, sigma=0.3))[1] == ROUNDS


@pytest.mark.parametrize(("rounds", "looks"), [(4, [4]), (12, [12]), (24, [12, 24]), (48, [12, 24, 48])])
def test_looks_double_and_none_comes_before_the_spread_is_known(rounds: int, looks: list[int]) -> None:
    assert look_rounds(rounds) == looks


def test_rounds_that_resemble_their_neighbours_widen_the_interval() -> None:
    """Single rounds taken as independent would miss the truth in 15 % of these."""
    rng, correlation = np.random.default_rng(8), 0.3
    rounds_RN = rng.normal(0, SIGMA, (1000, ROUNDS))
    for k in range(1, ROUNDS):
        rounds_RN[:, k] = correlation * rounds_RN[:, k - 1] + math.sqrt(1 - correlation**2) * rounds_RN[:, k]
    intervals = [log_ratio_interval(rounds, 0.95) for rounds in rounds_RN]
    assert np.mean([not i.low <= 1 <= i.high for i in intervals]) <= 0.10


def test_stopping_does_not_depend_on_where_the_interval_lies() -> None:
    ratios = np.random.default_rng(3).normal(0, 0.02, 12)
    assert precise_enough(ratios, 0.95, 0.05) == precise_enough(ratios + 5, 0.95, 0.05)


def test_one_round_says_nothing() -> None:
    interval = log_ratio_interval([0.3], 0.95)
    assert interval.low == 0 and math.isinf(interval.high)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_swapping_the_arms_inverts_the_interval(ratios: list[float]) -> None:
    one, other = log_ratio_interval(ratios, 0.95), log_ratio_interval([-r for r in ratios], 0.95)
    assert one.ratio * other.ratio == pytest.approx(1)
    assert one.low * other.high == pytest.approx(1)


def test_equivalence_needs_evidence_and_not_its_absence() -> None:
    rng = np.random.default_rng(4)
    base = rng.normal(1, 0.1, 5)
    assert equivalence(base + rng.normal(0, 0.001, 5), base, margin=0.05, confidence=0.95).state == "passed"
    assert equivalence(base + rng.normal(0, 0.2, 5), base, margin=0.05, confidence=0.95).state == "inconclusive"
    assert equivalence(base + 0.2, base, margin=0.05, confidence=0.95).state == "failed"


def test_a_value_that_is_not_finite_fails_equivalence() -> None:
    assert equivalence([1.0, math.nan], [1.0, 1.0], margin=0.1, confidence=0.95).state == "failed"


def test_one_seed_is_inconclusive() -> None:
    assert equivalence([1.0], [1.0], margin=0.1, confidence=0.95).state == "inconclusive"


def test_wrongly_passing_a_difference_at_the_margin_stays_rare() -> None:
    rng = np.random.default_rng(5)
    passed = [
        equivalence(rng.normal(0.05, 0.02, 5), np.zeros(5), margin=0.05, confidence=0.95).state == "passed"
        for _ in range(2000)
    ]
    assert np.mean(passed) <= 0.06
