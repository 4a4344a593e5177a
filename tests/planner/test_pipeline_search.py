"""The search against brute force, its memory against the limit, its reasons against what was asked."""

import itertools
import math

import pytest

from workbench.errors import Refused
from workbench.parallel.schedules import schedule_table
from workbench.planner.pipeline import compile_table, simulate
from workbench.planner.pipeline_search import LayerCosts, peak_activation_bytes, search

GIB = 2.0**30


def layers(n: int = 12, **heavy: float) -> list[LayerCosts]:
    """Equal blocks between an embedding that costs little and a head that costs two."""
    block = LayerCosts(1e-3, 1e-3, 1e-3, 0.1 * GIB, 0.5 * GIB, heavy.get("fixed", 0.0))
    head = block._replace(forward=2e-3, backward_input=2e-3, backward_weight=2e-3)
    return [block] * (n - 1) + [head]


def test_the_fastest_found_is_the_fastest_of_all_splits():
    found = search(layers(8), 3, 6, schedules=["1f1b"], microbatches=[6], transfer_latency=1e-4)
    everything = []
    for cuts in itertools.combinations(range(1, 8), 2):
        costs = [sum(layer.forward for layer in layers(8)[a:b]) for a, b in itertools.pairwise((0, *cuts, 8))]
        everything.append(simulate(schedule_table("1f1b", 3, 6), (costs, costs, costs), 1e-4).makespan)
    assert found.best.makespan == pytest.approx(min(everything))
    assert found.best.time_per_sample == pytest.approx(found.best.makespan / 6)


def test_time_orders_them_and_memory_decides_between_schedules():
    free = search(layers(), 4, 16)
    assert [c.time_per_sample for c in free.ranked] == sorted(c.time_per_sample for c in free.ranked)
    assert {c.shape.schedule for c in free.ranked} >= {"gpipe", "1f1b", "zb-h2", "zb-v", "interleaved-1f1b"}
    need = {c.shape.schedule: max(c.peak_bytes) for c in free.ranked if (c.shape.microbatches, c.split) == (16, "time")}
    assert need["1f1b"] < need["zb-h2"] < need["gpipe"]
    tight = search(
        layers(), 4, 16, memory_limit=(need["1f1b"] + need["zb-h2"]) / 2, microbatches=[16], schedules=[*need]
    )
    assert {c.shape.schedule for c in tight.ranked} >= {"1f1b", "zb-h1"} and "gpipe" not in {
        c.shape.schedule for c in tight.ranked
    }
    assert all(max(c.peak_bytes) <= (need["1f1b"] + need["zb-h2"]) / 2 for c in tight.ranked)
    reason = next(e.reason for e in tight.excluded if e.shape.schedule == "gpipe")
    assert "GiB of" in reason and "16 in flight" in reason


def test_a_split_by_bytes_fits_where_one_by_time_does_not():
    """1F1B's first rank holds four micro-batches and its last one, so it must have fewer layers when memory is short."""
    equal = [LayerCosts(1e-3, 1e-3, 1e-3, GIB)] * 16
    options = {"schedules": ["1f1b"], "microbatches": [8]}
    assert max(search(equal, 4, 8, **options).best.peak_bytes) == 16 * GIB
    tight = search(equal, 4, 8, memory_limit=12 * GIB, **options)
    assert [e.split for e in tight.excluded] == ["time"] and tight.best.boundaries[0] <= 3
    assert max(tight.best.peak_bytes) <= 12 * GIB


def test_what_passes_cost_whatever_their_size_decides_the_micro_batches():
    def most(fixed: float) -> int:
        return search(layers(fixed=fixed), 4, 32, schedules=["1f1b"]).best.shape.microbatches

    assert most(0.0) == 32  # the bubble only shrinks
    assert 1 <= most(5e-3) < 32


def test_what_does_not_work_is_left_out_with_the_reason():
    found = search(
        layers(6), 4, 8, schedules=["interleaved-1f1b", "dualpipe-v", "1f1b"], chunks=[2], microbatches=[2, 3, 8]
    )
    reasons = {(e.shape.schedule, e.shape.microbatches): e.reason for e in found.excluded}
    assert "8 stages of 6 layers" in reasons["interleaved-1f1b", 8]
    assert "do not divide 8 samples" in reasons["1f1b", 3]
    wide = search(layers(16), 4, 8, schedules=["interleaved-1f1b", "dualpipe-v"], chunks=[2], microbatches=[2, 4])
    assert {(e.shape.schedule, e.shape.microbatches) for e in wide.excluded} == {
        ("interleaved-1f1b", 2), ("dualpipe-v", 2), ("dualpipe-v", 4),
    }  # fmt: skip
    with pytest.raises(Refused, match="GiB"):
        _ = search(layers(), 4, 8, memory_limit=1.0, schedules=["1f1b"]).best
    with pytest.raises(Refused, match="forward time"):
        search([LayerCosts(math.nan, 1, 1)], 1, 1)


def test_peak_bytes_count_each_stages_own():
    table = compile_table(schedule_table("zb-v", 2, 8))
    whole = peak_activation_bytes(table, [1.0] * 4)
    assert whole == list(table.peak_in_flight_of_rank)
    assert peak_activation_bytes(table, [1.0, 1.0, 0.0, 0.0])[0] == table.peak_in_flight[0]


def test_any_split_may_be_given():
    found = search(layers(8), 2, 4, schedules=["1f1b"], microbatches=[4], splits={"mine": lambda costs, stages: [2]})
    assert found.best.split == "moved" and found.best.boundaries != (2,)  # it was far from balance
    assert [c.boundaries for c in found.ranked] == [found.best.boundaries]
