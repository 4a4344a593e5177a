"""Where an explosion began, from records of gradient norms alone. Imports no torch.

Three steps are told apart. The explosion *surfaces* where norms stop being finite for good, or the total norm stays a hundred
times above what it used to be. (Norms that come back are those of steps that a loss scaler skipped.) The total norm began to
*run away* some steps before. And one layer may have been out of line before that, perhaps from the start: there it *began*.

The rule. Each layer is described by x = log10(gradient norm / weight norm), or of the gradient norm alone where weights were
not recorded, minus the median of that over the layers at the same step: what all layers do together is training, not a
fault of one. A layer is out of line

- against its own history, while |x − median| ≥ max(6 σ, 0.7) with median and σ (1.4826 × median absolute deviation, at least
  0.1) over its last 60 records that were in line; it counts if it stays so until the explosion surfaces, with gaps of at most
  two records, and began at the first record of that stretch;
- against its peers, if |x| ≥ 6 σ with σ over the layers (at least 0.25) both in the first 20 records and in the last 10 before
  the run-away; it then began at the first record. Too large an initialisation shows like this, with too *small* a ratio.

The earliest beginning wins; among equal ones the largest deviation. If nothing was out of line before norms became
non-finite, and only some of them did, it began in the last of these in the model's order, since a backward pass spoils what
comes after it, towards the input. Otherwise no single layer is to blame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from workbench.errors import Refused

SURFACE_FACTOR = 100.0
"""A factor of 50 over a run occurs in healthy training: an idle start, then learning."""
SUSTAINED = 3
PATIENCE = 8
"""Skipped steps at the end of a run that may still be a loss scaler at work."""
MIN_HISTORY = 10
HISTORY = 60
OWN_SIGMA, OWN_DECADES, OWN_FLOOR = 6.0, 0.7, 0.1
PEER_SIGMA, PEER_FLOOR = 6.0, 0.25
EARLY, LATE = 20, 10
GAP = 2


@dataclass(frozen=True)
class Explosion:
    """An explosion and its beginning.

    Attributes:
        layer: where it began, or ``None`` when no single layer was out of line before the rest.
        began: step at which that layer left the line; equal to ``runaway`` without one.
        runaway: step from which the total norm ran away.
        surfaced: step at which it could not be overlooked.
        deviation: decades by which the layer was out of line at ``began``, with its sign.
        reason: which part of the rule decided.
    """

    layer: str | None
    began: int
    runaway: int
    surfaced: int
    deviation: float
    reason: Literal["own history", "peers from the start", "last non-finite layer", "all layers together"]

    def __str__(self) -> str:
        where = f"{self.layer} ({self.reason}, {self.deviation:+.1f} decades)" if self.layer else "all layers together"
        return f"explosion began at step {self.began} in {where}, ran away from {self.runaway}, surfaced at {self.surfaced}"


def find_explosion(
    layers: Sequence[str],
    steps: Sequence[int] | np.ndarray,
    norm: np.ndarray,
    weight: np.ndarray | None = None,
    skipped: Sequence[bool] | np.ndarray | None = None,
) -> Explosion | None:
    """The explosion in a run's records, or ``None`` for a run without one.

    Args:
        layers: names in the model's order, input first.
        steps: S recorded steps, ascending.
        norm: (S, layers) gradient norms before clipping; NaN and infinities where they were.
        weight: (S, layers) norms of the weights, if recorded.
        skipped: of each step, whether a loss scaler skipped its update.
    """
    norm = np.asarray(norm, dtype=float)
    if norm.shape != (len(steps), len(layers)) or (weight is not None and np.shape(weight) != norm.shape):
        raise Refused("shape of the norms", norm.shape, allowed=f"(steps, layers) = ({len(steps)}, {len(layers)})")
    skips = np.zeros(len(steps), dtype=bool) if skipped is None else np.asarray(skipped, dtype=bool)
    surfaced = _surfaced(norm, skips)
    if surfaced is None:
        return None
    runaway = _runaway(norm, surfaced)
    x = _out_of_common(
        norm[: surfaced + 1], None if weight is None else np.asarray(weight, dtype=float)[: surfaced + 1]
    )
    candidates = [*_against_history(x), *_against_peers(x, runaway)]
    if candidates:
        began, _, k, deviation, reason = min(candidates, key=lambda c: (c[0], -c[1]))
        return Explosion(layers[k], int(steps[began]), int(steps[runaway]), int(steps[surfaced]), deviation, reason)
    broken = np.flatnonzero(~np.isfinite(norm[surfaced]))
    at = int(steps[surfaced])
    if len(broken) and broken[-1] < len(layers) - 1:
        return Explosion(layers[broken[-1]], at, at, at, float("nan"), "last non-finite layer")
    return Explosion(None, int(steps[runaway]), int(steps[runaway]), at, 0.0, "all layers together")


Candidate = tuple[int, float, int, float, Literal["own history", "peers from the start"]]
"""Beginning, size of the deviation, layer, deviation with its sign, reason."""


def _surfaced(norm: np.ndarray, skipped: np.ndarray) -> int | None:
    total = _total(norm)
    # Norms that are no numbers for the rest of the run. Those that come back are a loss scaler's skipped steps.
    numbers = np.flatnonzero(np.isfinite(total))
    lost = int(numbers[-1]) + 1 if len(numbers) else 0
    if lost == len(total) or (skipped[lost:].all() and len(total) - lost < PATIENCE):
        lost = len(total)
    for s in range(MIN_HISTORY, lost - SUSTAINED + 1):
        usual = np.nanpercentile(total[:s], 90) if np.isfinite(total[:s]).any() else 0.0
        if usual > 0 and (total[s : s + SUSTAINED] > SURFACE_FACTOR * usual).all():
            return s
    return lost if lost < len(total) else None


def _total(norm: np.ndarray) -> np.ndarray:
    """Total norm per record; NaN where it is not finite."""
    total = np.sqrt((norm**2).sum(axis=1))
    return np.where(np.isfinite(total), total, np.nan)


def _runaway(norm: np.ndarray, surfaced: int) -> int:
    """First record of the stretch up to ``surfaced`` whose total is over three times the ten records before it."""
    total = _total(norm[: surfaced + 1])
    past = [_nanmedian(total[max(s - 10, 0) : max(s, 1)], axis=0) for s in range(len(total))]
    high = total > 3 * np.array(past)
    high[surfaced] = True
    return _start_of_stretch(high)


def _out_of_common(norm: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """x of the module's docstring; NaN where it is not defined: zero gradients, zero weights, non-finite values."""
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log10(norm) - (0 if weight is None else np.log10(weight))
    x[~np.isfinite(x)] = np.nan
    return x - _nanmedian(x, axis=1)[:, None]


def _against_history(x: np.ndarray) -> list[Candidate]:
    """Layers out of line with their own past up to the last record, where norms may be missing for good reason."""
    records, num_layers = x.shape
    in_line = x.copy()
    out = np.zeros_like(x, dtype=bool)
    deviation = np.zeros_like(x)
    for s in range(1, records):
        past = in_line[max(s - HISTORY, 0) : s]
        known = (~np.isnan(past)).sum(axis=0) >= MIN_HISTORY
        median = _nanmedian(past, axis=0)
        sigma = np.maximum(1.4826 * _nanmedian(np.abs(past - median), axis=0), OWN_FLOOR)
        deviation[s] = x[s] - median
        out[s] = known & (np.abs(deviation[s]) >= np.maximum(OWN_SIGMA * sigma, OWN_DECADES))
        in_line[s, out[s]] = np.nan
    found: list[Candidate] = []
    for k in range(num_layers):
        # The record that surfaced says nothing of a layer whose norm is no number by then.
        flags = out[:, k] if np.isfinite(x[-1, k]) else out[:-1, k]
        if flags[-1 - GAP :].any():
            began = _start_of_stretch(flags[: np.flatnonzero(flags)[-1] + 1])
            found.append((began, abs(deviation[began, k]), k, float(deviation[began, k]), "own history"))
    return found


def _against_peers(x: np.ndarray, runaway: int) -> list[Candidate]:
    before = x[: max(runaway, 1)]
    early, late = _nanmedian(before[:EARLY], axis=0), _nanmedian(before[-LATE:], axis=0)
    sizes = []
    for level in (early, late):
        # Layers that never had a gradient have no level.
        sigma = max(1.4826 * float(_nanmedian(np.abs(level), axis=0)), PEER_FLOOR)
        sizes.append(np.abs(level) / sigma)
    both = np.minimum(*sizes)
    outliers = [int(k) for k in np.flatnonzero(np.nan_to_num(both) >= PEER_SIGMA)]
    return [(0, abs(float(early[k])), k, float(early[k]), "peers from the start") for k in outliers]


def _start_of_stretch(flags: np.ndarray) -> int:
    """First record of the stretch of true flags that reaches the end, allowing gaps of ``GAP`` records."""
    start, missed = len(flags) - 1, 0
    for s in range(len(flags) - 1, -1, -1):
        if flags[s]:
            start, missed = s, 0
        else:
            missed += 1
            if missed > GAP:
                break
    return start


def _nanmedian(values: np.ndarray, axis: int) -> np.ndarray:
    """``np.nanmedian`` without its warning for a slice without numbers, whose median is NaN."""
    empty = np.asarray(np.isnan(values).all(axis=axis))
    filled = np.where(np.expand_dims(empty, axis), 0.0, values)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=axis))
