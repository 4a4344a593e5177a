"""Every table holds each pass once, in an order that can run, within its schedule's memory; torch's own tables agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import Refused
from workbench.parallel.schedules import (
    LOOPED,
    NAMES,
    SPLIT_BACKWARD,
    Action,
    Table,
    num_chunks,
    rank_of_stage,
    schedule_table,
    stages_of_rank,
)

FITTING = [(1, 2), (2, 4), (4, 8), (4, 12), (5, 20), (8, 24)]


def check_runs(table: Table, name: str, microbatches: int, chunks: int | None = None) -> None:
    """Runs the table by rounds, each rank doing what it can: fails where a pass comes before what it needs, or never."""
    ranks, v = len(table), num_chunks(name, chunks)
    stages, done, at = ranks * v, set[Action](), [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while at[rank] < len(row) and all(any(n in done for n in need) for need in needs(row[at[rank]], stages)):
                assert row[at[rank]] not in done
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in table], "deadlock"
    for rank, row in enumerate(table):
        assert {a.stage for a in row} == set(stages_of_rank(name, rank, ranks, chunks))
    for stage in range(stages):
        for i in range(microbatches):
            kinds = sorted(a.kind for a in done if a.stage == stage and a.microbatch == i)
            assert kinds in (["B", "F"], ["F", "I", "W"])
            assert name in SPLIT_BACKWARD or kinds == ["B", "F"]
    assert len(done) == sum(len(row) for row in table) and {a.microbatch for a in done} == set(range(microbatches))


def needs(action: Action, stages: int) -> list[list[Action]]:
    """What must be done before: of each inner list, one."""
    kind, stage, i = action
    if kind == "F":
        return [[Action("F", stage - 1, i)]] if stage else []
    if kind == "W":
        return [[Action("I", stage, i)]]
    after = [[Action("I", stage + 1, i), Action("B", stage + 1, i)]] if stage < stages - 1 else []
    return [[Action("F", stage, i)], *after]


def in_flight(row: tuple[Action, ...]) -> int:
    """Most activations that a rank holds at once: from F until all of the backward pass is done."""
    held = most = 0
    for action in row:
        held += (action.kind == "F") - (action.kind in "BW")
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), FITTING)
def test_a_table_runs(name, ranks, microbatches):
    check_runs(schedule_table(name, ranks, microbatches), name, microbatches)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 20), st.integers(2, 4))
def test_any_size_runs_or_is_refused(name, ranks, microbatches, chunks):
    v = chunks if name in LOOPED else None
    try:
        table = schedule_table(name, ranks, microbatches, v)
    except Refused:
        assert (name == "interleaved-1f1b" and microbatches % ranks) or (
            name == "dualpipe-v" and microbatches < 2 * ranks
        )
        return
    check_runs(table, name, microbatches, v)


def test_activations_in_flight_are_what_the_papers_say():
    p, m = 4, 16

    def peaks(name, chunks=None):
        return [in_flight(row) for row in schedule_table(name, p, m, chunks)]

    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [p - r for r in range(p)]
    assert peaks("interleaved-1f1b", 2) == [(2 - 1) * p + 2 * (p - r - 1) + 1 for r in range(p)]
    assert peaks("looped-bfs", 3) == [3 * m] * p
    assert peaks("zb-h1") == [p] * p
    assert peaks("zb-h2") == [2 * p - 1] * p
    assert peaks("zb-v") == [2 * p] * p  # of stages half as long, so 1F1B's memory on its first rank
    assert max(peaks("dualpipe-v")) == 2 * p + 1
    assert max(peaks("zb-1p")) == p
    assert max(peaks("zb-2p")) == 2 * p


def test_stages_lie_in_a_loop_or_in_a_v():
    assert [rank_of_stage("interleaved-1f1b", s, 3, 2) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of_stage("zb-v", s, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    for name in NAMES:
        for rank in range(3):
            assert all(rank_of_stage(name, s, 3) == rank for s in stages_of_rank(name, rank, 3))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (("zb-h3", 4, 8), "did you mean 'zb-h2' or 'zb-h1'"),
        (("gpipe", 0, 8), "1 or more"),
        (("gpipe", 4, 0), "1 or more"),
        (("interleaved-1f1b", 4, 10), "take 8 or 12"),
        (("interleaved-1f1b", 4, 2), "take 4"),
        (("dualpipe-v", 4, 7), "take 8"),
        (("1f1b", 4, 8, 2), "allowed: 1"),
        (("zb-v", 4, 8, 3), "allowed: 2"),
        (("interleaved-1f1b", 4, 8, 1), "1f1b is the schedule"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(request_, said):
    with pytest.raises(Refused, match=said):
        schedule_table(*request_)
