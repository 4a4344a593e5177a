"""When a difference is a difference: intervals on paired log-ratios, a rule to stop, and equivalence over seeds.

Blocks of neighbouring rounds share the machine's mood, so the ratio of two arms within a round is far steadier than either
time. On log-ratios the mean is symmetric (twice as fast and half as fast are the same distance from equal), and an interval by
Student's t keeps its coverage from a handful of rounds on; a bootstrap of the median is too narrow below twelve.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from workbench.experiment.finding import GuardState

LOOKS = 3
"""Times that the sequential rule may stop: a quarter, half, and all the way through the rounds."""
FIRST_LOOK = 12
"""Rounds before the first look, where there are as many: fewer leave the spread itself badly known."""
TRIM = 0.2
"""Share of the pairs of rounds that is left out at either end."""


class RatioInterval(NamedTuple):
    """A ratio with its interval, and the interval's half-width on the log scale."""

    ratio: float
    low: float
    high: float
    half_width: float


def log_ratio_interval(log_ratios: ArrayLike, confidence: float, process_spread: float = 0.0) -> RatioInterval:
    """Interval on the centre of paired log-ratios, given back as ratios; infinite with fewer than two rounds.

    The centre is a trimmed mean (Tukey and McLaughlin 1963; Yuen 1974): a fifth of the pairs of rounds at either end is left
    out, for one interruption by the system outweighs ten quiet rounds. A pair is two neighbouring rounds, A B B A, so that
    order and short memory of the machine cancel. In made-up rounds with one in twelve interrupted, Student's t on plain means
    found a 10 % difference in 90 % of runs, and this in 99.9 %; equal arms were called different in at most 5 % by either.

    Args:
        process_spread: standard deviation of the log-ratio between pairs of fresh processes of equal arms. One pair of
            processes cannot show it, however many rounds: where its memory lies stays as it is. It widens the interval.
    """
    values = np.asarray(log_ratios, dtype=float)
    n = len(values)
    if n < 2:
        return RatioInterval(math.exp(values.mean()) if n else math.nan, 0.0, math.inf, math.inf)
    units = np.sort([pair.mean() for pair in np.array_split(values, n // 2)] if n >= FIRST_LOOK else values)
    cut = int(TRIM * len(units))
    kept = units[cut : len(units) - cut]
    spread = np.clip(units, kept[0], kept[-1]).std(ddof=1)
    error = spread * math.sqrt((len(units) - 1) / (len(kept) * (len(kept) - 1)))
    upper = 0.5 + confidence / 2
    half = math.hypot(stats.t.ppf(upper, len(kept) - 1) * error, stats.norm.ppf(upper) * process_spread)
    mean = kept.mean()
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), half)


def look_rounds(max_rounds: int) -> list[int]:
    """The numbers of rounds after which the rule looks at the data.

    They double, for the rounds that an interval of given width takes grow with the square of the noise: a quiet machine stops at
    the first look, and one with twice the noise still has the rounds it needs. In 2,000 made-up runs per figure at σ = 0.15,
    looks at 12, 24 and 48 found 97 % of the 10 % differences, looks at 12, 18 and 24 found 71 %; at σ = 0.03 both take 12.
    """
    return sorted({max(math.ceil(share * max_rounds), min(FIRST_LOOK, max_rounds)) for share in (1 / 4, 1 / 2, 1)})


def look_confidence(confidence: float) -> float:
    """Confidence of the interval at each look, by Bonferroni, so that all looks together keep ``confidence``."""
    return 1 - (1 - confidence) / LOOKS


def precise_enough(log_ratios: ArrayLike, confidence: float, effect: float, process_spread: float = 0.0) -> bool:
    """Whether the interval at a look is narrower than the effect asked for, on the log scale.

    The rule looks at the interval's width alone, never at where it lies, so that stopping cannot chase a result.
    """
    interval = log_ratio_interval(log_ratios, look_confidence(confidence), process_spread)
    return interval.half_width < math.log1p(effect)


class Equivalence(NamedTuple):
    """Mean paired difference with its interval at the level of the two one-sided tests."""

    state: GuardState
    difference: float
    low: float
    high: float


def equivalence(
    variant: Sequence[float], baseline: Sequence[float], *, margin: float, confidence: float
) -> Equivalence:
    """Two one-sided paired t tests (Schuirmann 1987): is the mean difference inside ±margin?

    ``passed`` when the interval at ``2·confidence − 1`` lies inside the margin, ``failed`` when it lies wholly outside or a
    value is not finite, ``inconclusive`` otherwise. A test for difference with p > 0.05 would not do: it passes whatever is
    noisy enough.

    Args:
        variant, baseline: one value per seed, in the same order of seeds.
    """
    differences = np.asarray(variant, dtype=float) - np.asarray(baseline, dtype=float)
    if not np.isfinite(differences).all():
        return Equivalence("failed", math.nan, math.nan, math.nan)
    n = len(differences)
    mean = float(differences.mean())
    spread = float(differences.std(ddof=1)) if n > 1 else math.inf
    half = float(stats.t.ppf(confidence, n - 1)) * spread / math.sqrt(n) if n > 1 else math.inf
    low, high = mean - half, mean + half
    state: Literal["passed", "failed", "inconclusive"] = "inconclusive"
    if -margin < low and high < margin:
        state = "passed"
    elif low >= margin or high <= -margin:
        state = "failed"
    return Equivalence(state, mean, low, high)
