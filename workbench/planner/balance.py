"""Even splits of a sequence of layers, fast enough to make one for every candidate of a search."""

from collections.abc import Sequence

import numpy as np


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Boundaries that make the costliest of ``num_stages`` stages as cheap as can be, none empty."""
    return balanced_by_stage([costs] * num_stages)


def balanced_by_stage(costs: Sequence[Sequence[float]]) -> list[int]:
    """The same where a layer's cost depends on the stage that it comes to lie in: ``costs[stage][layer]``.

    Exact, by dynamic programming over stages: for every end, the best begin of the last stage.
    """
    sums = np.cumsum(np.array(costs, dtype=float), axis=1)
    num_layers = sums.shape[1]
    no_stage = np.tri(num_layers + 1, dtype=bool)  # [begin, end] with begin >= end
    best = np.full(num_layers + 1, np.inf)  # costliest stage so far, by end
    best[0] = 0
    begins = []
    for row in sums:
        until = np.concatenate([[0.0], row])
        costliest = np.maximum(best[:, None], until - until[:, None])
        costliest[no_stage] = np.inf
        begins.append(costliest.argmin(axis=0))
        best = costliest.min(axis=0)
    cuts = [num_layers]
    for begin in reversed(begins[1:]):
        cuts.append(int(begin[cuts[-1]]))
    return cuts[:0:-1]
