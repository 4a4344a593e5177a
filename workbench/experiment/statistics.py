"""When a difference is a difference: intervals on paired log-ratios, a rule to stop, and equivalence over seeds.

Blocks of neighbouring rounds share the machine's mood, so the ratio of two arms within a round is far steadier than either
time. On log-ratios the mean is symmetric (twice as fast and half as fast are the same distance from equal) and Student's t
interval keeps its coverage from a handful of rounds on; a bootstrap of the median is too narrow below twelve.
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


class RatioInterval(NamedTuple):
    """A ratio with its interval, and the interval's half-width on the log scale."""

    ratio: float
    low: float
    high: float
    half_width: float


def log_ratio_interval(log_ratios: ArrayLike, confidence: float) -> RatioInterval:
    """Student t interval on the mean of paired log-ratios, given back as ratios; infinite with fewer than two.

    Its spread is that of means over batches of neighbouring rounds (batch means, Law and Kelton): 2, 3 and 4 rounds a batch
    at 12, 24 and 48, single rounds below. On crowded cores neighbouring rounds resemble each other, and t on single rounds is
    then too narrow: between equal arms its mean over its error had a root mean square of 1.5 where independent rounds give
    1.1. In made-up rounds with a correlation of 0.3 the sequential rule calls 8 % of equal arms different on single rounds,
    and 5.5 % on batches.
    """
    values = np.asarray(log_ratios, dtype=float)
    n = len(values)
    if n < 2:
        return RatioInterval(math.exp(values.mean()) if n else math.nan, 0.0, math.inf, math.inf)
    batches = n // round(math.sqrt(n / 3)) if n >= FIRST_LOOK else n
    means = np.array([batch.mean() for batch in np.array_split(values, batches)])
    mean, error = values.mean(), means.std(ddof=1) / math.sqrt(batches)
    half = float(stats.t.ppf(0.5 + confidence / 2, batches - 1) * error)
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


def precise_enough(log_ratios: ArrayLike, confidence: float, effect: float) -> bool:
    """Whether the interval at a look is narrower than the effect asked for, on the log scale.

    The rule looks at the interval's width alone, never at where it lies, so that stopping cannot chase a result.
    """
    return log_ratio_interval(log_ratios, look_confidence(confidence)).half_width < math.log1p(effect)


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
