"""The partitioner against every split there is."""

import itertools
import math
import random

import pytest

from workbench.errors import Refused
from workbench.parallel.schedules import schedule_table
from workbench.planner.partition import Partition, partition, spans_of
from workbench.planner.pipeline import simulate
from workbench.planner.pipeline_search import LayerCosts, search

CASES = 200


def random_case(seed: int) -> dict:
    """A list of costs, some with a memory limit, some with spare devices; integers, so that sums are exact in any order."""
    draw = random.Random(seed)
    layers = draw.randint(1, 8)
    stages = draw.randint(1, min(layers, 5))
    heavy = draw.choice([10, 100])
    case = {
        "costs": [draw.choice([0, draw.randint(1, 10), draw.randint(1, heavy)]) for _ in range(layers)],
        "num_stages": stages,
    }
    if seed % 2:
        case["memory"] = [draw.randint(0, 20) for _ in range(layers)]
        if seed % 4 == 3:  # in flight: earlier stages hold more
            case["memory"] = [[(stages - s) * m for m in case["memory"]] for s in range(stages)]
        total = sum(case["memory"][0] if seed % 4 == 3 else case["memory"])
        case["memory_limit"] = draw.uniform(0.3, 1.2) * total
    if seed % 3:
        case |= {"devices": stages + draw.randint(0, 3), "sharing": draw.choice(["replication", "tensor"])}
        case["overhead"] = draw.choice([0.0, 0.25, 1.5])
    return case


def exhaustive(
    costs, num_stages, memory=None, memory_limit=math.inf, devices=None, sharing="replication", overhead=0.0
):
    """(slowest time, sum of squared times) of the best, and the least memory limit that any split keeps."""
    best, least = (math.inf, math.inf), math.inf
    rows = memory if memory and isinstance(memory[0], list) else [memory or [0] * len(costs)] * num_stages
    counts = range(1, (devices or num_stages) - num_stages + 2)
    for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
        spans = spans_of(cuts, len(costs))
        for given in itertools.product(counts, repeat=num_stages):
            if sum(given) > (devices or num_stages):
                continue
            tensor = sharing == "tensor"
            times = [
                sum(costs[a:b]) / r * (1 + overhead if tensor and r > 1 else 1.0)
                for (a, b), r in zip(spans, given, strict=True)
            ]
            held = [sum(row[a:b]) / (r if tensor else 1) for row, (a, b), r in zip(rows, spans, given, strict=True)]
            least = min(least, max(held))
            if max(held) <= memory_limit:
                best = min(best, (max(times), sum(t * t for t in times)))
    return best, least


@pytest.mark.parametrize("seed", range(CASES))
def test_the_split_is_the_best_of_all_there_are(seed: int) -> None:
    case = random_case(seed)
    (slowest, squares), least = exhaustive(**case)
    if math.isinf(slowest):
        with pytest.raises(Refused, match="memory limit") as refused:
            partition(**case)
        assert f"{least:.6g} or more" in str(refused.value)
        partition(**case | {"memory_limit": least * (1 + 1e-9)})
        return
    found = partition(**case)
    assert found.slowest == slowest
    assert sum(t * t for t in found.stage_times) == pytest.approx(squares, rel=1e-12)
    check_whole(found, case)


def check_whole(found: Partition, case: dict) -> None:
    """Boundaries, costs and devices describe one split of all layers."""
    spans = spans_of(found.boundaries, len(case["costs"]))
    assert all(a < b for a, b in spans) and len(spans) == case["num_stages"]
    assert found.stage_costs == tuple(sum(case["costs"][a:b]) for a, b in spans)
    assert min(found.devices) >= 1 and sum(found.devices) <= case.get("devices", case["num_stages"])


def test_the_cases_hold_every_kind() -> None:
    """Else the comparison above would say less than it seems to."""
    cases = [random_case(seed) for seed in range(CASES)]
    refused = sum(math.isinf(exhaustive(**case)[0][0]) for case in cases)
    assert 10 < refused < CASES / 2
    assert sum(case.get("devices", 0) > case["num_stages"] for case in cases) > 50


def test_a_heavy_layer_bounds_every_split_until_devices_share_it() -> None:
    costs = [1.0, 1.0, 8.0, 1.0, 1.0]
    assert [partition(costs, n).slowest for n in (3, 4, 5)] == [8, 8, 8]
    replicated = partition(costs, 3, devices=6)
    assert replicated.devices == (1, 4, 1) and replicated.slowest == 2 and replicated.imbalance == pytest.approx(0)
    parallel = partition(costs, 3, devices=6, sharing="tensor", overhead=0.5)
    assert parallel.slowest == 3


def test_tensor_parallelism_divides_memory_and_replication_does_not() -> None:
    asked = {"costs": [1.0, 1.0], "num_stages": 2, "memory": [10.0, 1.0], "memory_limit": 5.0, "devices": 3}
    assert partition(**asked, sharing="tensor").devices == (2, 1)
    with pytest.raises(Refused, match="10 or more"):
        partition(**asked)


def test_of_equally_fast_splits_the_most_even_is_taken() -> None:
    found = partition([9.0, 1.0, 1.0, 1.0, 1.0], 3)
    assert found.boundaries == (1, 3) and found.stage_times == (9, 2, 2)
    assert found.imbalance == pytest.approx(9 / (13 / 3) - 1)


def test_small_layers_count_beside_large_ones() -> None:
    """A difference of running sums would see all of them as 0."""
    assert sorted(partition([1e17, 1.0, 1.0, 1.0], 3).stage_costs[1:]) == [1, 2]


def test_the_search_takes_it_as_a_split() -> None:
    block = LayerCosts(1.0, 1.0, 1.0)
    layers = [block, block, block._replace(forward=4.0), block, block, block]
    found = search(layers, 3, 6, schedules=["1f1b"], splits={"partition": lambda c, n: partition(c, n).boundaries})
    assert {c.split for c in found.ranked} <= {"partition", "moved"}
    cut = partition([sum(layer[:3]) for layer in layers], 3).boundaries
    times = [
        tuple(sum(getattr(c, f) for c in layers[a:b]) for a, b in spans_of(cut, 6)) for f in LayerCosts._fields[:3]
    ]
    assert found.best.makespan <= simulate(schedule_table("1f1b", 3, 6), (times[0], times[1], times[2])).makespan


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"costs": [1.0, 2.0], "num_stages": 3}, "at most the 2 layers"),
        ({"costs": [], "num_stages": 1}, "at most the 0 layers"),
        ({"costs": [1.0], "num_stages": 0}, "1 or more"),
        ({"costs": [1.0, -1.0], "num_stages": 1}, "-1.0"),
        ({"costs": [1.0, math.nan], "num_stages": 1}, "nan"),
        ({"costs": [1.0, math.inf], "num_stages": 1}, "inf"),
        ({"costs": [1.0, 1.0], "num_stages": 2, "devices": 1}, "one for each stage"),
        ({"costs": [1.0, 1.0], "num_stages": 1, "memory": [1.0]}, "each of 2 layers"),
        ({"costs": [1.0, 1.0], "num_stages": 1, "memory": [1.0, -2.0]}, "-2.0"),
        ({"costs": [1.0, 1.0], "num_stages": 1, "overhead": math.nan}, "overhead"),
        ({"costs": [1.0, 1.0], "num_stages": 1, "memory": [3.0, 4.0], "memory_limit": 6.0}, "7 or more"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_could(asked: dict, said: str) -> None:
    with pytest.raises(Refused, match=said):
        partition(**asked)
