"""Even splits against all splits there are."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.planner.balance import balanced, balanced_by_stage


@pytest.mark.parametrize(
    "costs", [[1, 1, 1, 1], [5, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 9], [3.5, 1, 4, 1, 5, 9, 2, 6]]
)
def test_a_balanced_split_is_the_best_there_is(costs):
    for stages in range(1, len(costs) + 1):
        cuts = balanced(costs, stages)
        assert len(cuts) == stages - 1
        every = itertools.combinations(range(1, len(costs)), stages - 1)
        assert slowest(costs, cuts) == pytest.approx(min(slowest(costs, c) for c in every))


def slowest(costs, cuts) -> float:
    return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=4, max_size=8), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_stage_may_weigh_its_layers(costs, factors):
    rows = [[factor * cost for cost in costs] for factor in factors]

    def heaviest(cuts) -> float:
        spans = itertools.pairwise((0, *cuts, len(costs)))
        return max(sum(row[a:b]) for row, (a, b) in zip(rows, spans, strict=True))

    every = itertools.combinations(range(1, len(costs)), len(factors) - 1)
    assert heaviest(balanced_by_stage(rows)) == pytest.approx(min(map(heaviest, every)), abs=1e-9)
