"""The simulator against closed forms, published bubble rates and tables that cannot run."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.published_bubbles import error_table
from workbench.errors import Refused
from workbench.parallel.schedules import NAMES, Action, num_chunks, schedule_table
from workbench.planner.pipeline import closed_form, compile_table, makespans, simulate

COMMITTED = Path(__file__).parents[1] / "benchmarks" / "results" / "bubbles.json"
positive = st.floats(0.01, 10)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), positive, positive, positive)
def test_gpipe_and_1f1b_have_their_closed_form(name, p, m, forward, backward_input, backward_weight):
    run = simulate(schedule_table(name, p, m), (forward, backward_input, backward_weight))
    assert run.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)
    assert run.makespan == pytest.approx((m + p - 1) * (forward + backward_input + backward_weight))
    assert closed_form(name, p, m)[1] == pytest.approx(run.bubble_fraction, abs=1e-9)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 8, 4), (8, 24, 3), (2, 2, 2)])
def test_loops_divide_the_bubble_by_their_chunks(name, p, m, v):
    run = simulate(schedule_table(name, p, m, v), (1.0, 1.5, 0.5))
    assert run.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
    assert closed_form(name, p, m, v)[1] == pytest.approx(run.bubble_fraction)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 24)])
def test_zero_bubble_is_zero_by_its_authors_definition(p, m):
    for name in ("zb-h2", "zb-v"):
        assert simulate(schedule_table(name, p, m), (1, 1, 1)).span_bubble_fraction == pytest.approx(0)
    # Table 1 of the paper: (p−1)(F+I−W) of a step is idle, a third of 1F1B's
    h1 = simulate(schedule_table("zb-h1", p, m), (1, 1, 1))
    assert h1.span_bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))


def test_unequal_stages_wait_for_the_slowest():
    run = simulate(schedule_table("1f1b", 3, 50), ([1, 2, 1], [1, 2, 1], [1, 2, 1]))
    assert run.makespan == pytest.approx(
        1 + 50 * 6 + 1 + 2
    )  # first input comes, work, first gradient comes, last one leaves
    assert run.busy == pytest.approx((150, 300, 150))
    assert run.bubble_of_rank[0] > 0.5 > 0.05 > run.bubble_of_rank[1]


def test_exposed_transfer_is_told_from_waiting():
    free = simulate(schedule_table("gpipe", 2, 4), (1, 1, 1))
    assert free.transfer_wait == (0, 0) and free.waiting == (3, 1)
    run = simulate(schedule_table("gpipe", 2, 4), (1, 1, 1), transfer=0.25)
    assert run.transfer_wait == pytest.approx((0.25, 0.25))  # the first activation there, the first gradient back
    assert run.makespan == pytest.approx(free.makespan + 0.5)
    assert not any(simulate(schedule_table("gpipe", 1, 4), (1, 1, 1), transfer=9).transfer_wait)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3), st.floats(0, 2), st.randoms(use_true_random=False))
def test_any_run_keeps_the_books(name, p, rounds, transfer, random):
    m = 2 * p * rounds
    table = schedule_table(name, p, m)
    times = [[random.uniform(0, 3) for _ in range(p * num_chunks(name))] for _ in range(3)]
    run = simulate(table, tuple(times), transfer)
    parts = zip(run.idle, run.waiting, run.transfer_wait, run.drain, strict=True)
    for idle, waiting, transfer_wait, drain in parts:
        assert idle == pytest.approx(waiting + transfer_wait + drain, abs=1e-6)
        assert min(waiting, transfer_wait, drain) >= 0
    cost = {"F": times[0], "I": times[1], "W": times[2], "B": [i + w for i, w in zip(*times[1:], strict=True)]}
    finished = {a: end for row, ends in zip(table, run.end, strict=True) for a, end in zip(row, ends, strict=True)}
    for row, starts, ends in zip(table, run.start, run.end, strict=True):
        assert all(later >= end for later, end in zip(starts[1:], ends, strict=False))
        for action, start, end in zip(row, starts, ends, strict=True):
            assert end == pytest.approx(start + cost[action.kind][action.stage])
            if action.kind == "F" and action.stage:
                before = Action("F", action.stage - 1, action.microbatch)
                assert start >= finished[before] + transfer * (before not in row) - 1e-9
    at_once = makespans(table, np.array(times)[:, :, None] * [1.0, 2.0], np.array([transfer, 2 * transfer]))
    assert at_once == pytest.approx([run.makespan, 2 * run.makespan])


def test_work_grows_with_the_passes_and_no_faster():
    def seconds(microbatches: int) -> float:
        table = schedule_table("zb-h1", 8, microbatches)
        spent = []
        for _ in range(5):
            compile_table.cache_clear()
            began = time.process_time()
            simulate(table, (1, 1, 1))
            spent.append(time.process_time() - began)
        return min(spent)

    assert seconds(256) < 8 * max(
        seconds(64), 1e-4
    )  # four times the passes; a quadratic sweep would take 16 times as long


def test_published_bubble_rates_are_reproduced():
    table = error_table()
    assert len(table) == 36 and {row["schedule"] for row in table} >= {"zb-1p", "zb-2p", "1f1b", "interleaved 1f1b"}
    assert all(abs(row["error"]) <= 0.01 for row in table)
    assert all(abs(row["error"]) <= 0.0002 for row in table if row["schedule"] != "interleaved 1f1b")


def test_the_committed_errors_are_what_the_code_gives():
    committed = json.loads(COMMITTED.read_text())
    for row, now in zip(committed["rows"], error_table(), strict=True):
        assert row == {
            **now,
            "simulated": pytest.approx(now["simulated"]),
            "error": pytest.approx(now["error"], abs=2e-5),
        }
    assert committed["largest_error"] == max(abs(row["error"]) for row in committed["rows"])


def test_a_table_that_deadlocks_says_who_waits_for_what():
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    crossed = (
        (f, b, Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)),
    )
    waits = "rank 0 waits before B of micro-batch 0 in stage 0, rank 1 waits before F of micro-batch 1 in stage 1"
    with pytest.raises(Refused, match=f"deadlocks: {waits}"):
        simulate(crossed, (1, 1, 1))
    with pytest.raises(Refused, match="rank 0 has B of micro-batch 0 in stage 0 before"):
        simulate(((b, f),), (1, 1, 1))
    for twice in ((f, f, b), (f, b, b), (f, b, Action("W", 0, 0)), (f, Action("I", 0, 0), b)):
        with pytest.raises(Refused, match="stands twice"):
            simulate((twice,), (1, 1, 1))
    for nothing in ((), ((f, b), ())):
        with pytest.raises(Refused, match="one pass or more"):
            simulate(nothing, (1, 1, 1))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(bad):
    table = schedule_table("1f1b", 2, 2)
    with pytest.raises(Refused, match="backward weight time"):
        simulate(table, (1, 1, bad))
    with pytest.raises(Refused, match="transfer time"):
        simulate(table, (1, 1, 1), bad)
    with pytest.raises(Refused, match="each of 2 stages"):
        simulate(table, ([1, 1, 1], 1, 1))
