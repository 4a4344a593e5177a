"""What a step moves, counted on four ranks, equals theory to the element; scalars (loss, norm) stand apart."""

from math import ceil, prod

import pytest

from tests.parallel.cases import CASES, EVEN, SHAPE, WORLD, outcome
from workbench.parallel.collectives import Collective

WIDTH, TOKENS = SHAPE.width, SHAPE.num_tokens


def moved(name: str) -> dict[tuple[str, str | None], int]:
    """Elements by operation and axis, the same on every rank."""
    per_rank = []
    for rank in range(WORLD):
        sums: dict[tuple[str, str | None], int] = {}
        for call in outcome(name, rank).calls:
            if call.elements > 1:
                sums[call.operation, call.axis] = sums.get((call.operation, call.axis), 0) + call.elements
        per_rank.append(sums)
    assert all(sums == per_rank[0] for sums in per_rank)
    return per_rank[0]


def elements(name: str, ranks: int = 1) -> int:
    """P, each parameter's first dimension padded to a multiple of the ranks that shard it."""
    return sum(ceil(shape[0] / ranks) * ranks * prod(shape[1:]) for shape in outcome(name).shapes.values())


def test_ddp_reduces_every_gradient_once() -> None:
    assert moved("ddp") == {("all-reduce", "replicate"): elements("ddp")}


def test_ddp_without_sync_reduces_only_after_the_last_micro_batch() -> None:
    assert moved("ddp, accumulated") == moved("ddp")


def test_ddp_reduces_no_frozen_gradient() -> None:
    name = "ddp, frozen"
    trained = sum(prod(outcome(name).shapes[parameter]) for parameter in outcome(name).gradient_errors)
    assert trained < elements(name)
    assert moved(name) == {("all-reduce", "replicate"): trained}


@pytest.mark.parametrize("name", ["fsdp", "fsdp, prefetched", "fsdp, clipped"])
def test_fsdp_gathers_twice_and_scatters_once(name: str) -> None:
    P = elements(name, WORLD)
    assert moved(name) == {("all-gather", "shard"): 2 * P, ("reduce-scatter", "shard"): P}


@pytest.mark.parametrize("name", ["fsdp, recomputed", "fsdp, recomputed selectively"])
def test_recomputation_gathers_no_third_time(name: str) -> None:
    assert moved(name) == moved("fsdp")


def test_without_resharding_fsdp_gathers_once() -> None:
    P = elements("fsdp", WORLD)
    assert moved("fsdp, not resharded") == {("all-gather", "shard"): P, ("reduce-scatter", "shard"): P}


def test_accumulation_saves_the_scatters_of_all_but_the_last_micro_batch() -> None:
    P, steps = elements("fsdp", WORLD), len(EVEN[0])
    gathered = {("all-gather", "shard"): 2 * P * steps}
    assert moved("fsdp, accumulated, synchronised last") == {**gathered, ("reduce-scatter", "shard"): P}
    assert moved("fsdp, accumulated, synchronised each") == {**gathered, ("reduce-scatter", "shard"): P * steps}


def test_hsdp_shards_on_one_axis_and_sums_the_shards_on_the_other() -> None:
    P = elements("hsdp", 2)
    assert moved("hsdp") == {
        ("all-gather", "shard"): 2 * P,
        ("reduce-scatter", "shard"): P,
        ("all-reduce", "replicate"): P // 2,
    }


def test_tensor_parallelism_sums_activations_twice_per_block_and_direction() -> None:
    samples, steps = EVEN[0][0], len(EVEN[0])
    activations = 4 * SHAPE.depth * steps * samples * TOKENS * WIDTH
    # Weights that all heads share: scale and shift of the norms of q and k.
    shared = 4 * SHAPE.depth * SHAPE.head_dim
    assert moved("tp, replicated")["all-reduce", "tensor"] == activations + shared


def test_parameters_in_half_precision_move_half_the_bytes() -> None:
    def gathered(name: str) -> int:
        return sum(call.bytes for call in outcome(name).calls if call.operation == "all-gather")

    assert gathered("fsdp, fp32") == 2 * gathered("fsdp, bf16")


@pytest.mark.parametrize(("operation", "factor"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)])
def test_a_ring_sends_its_share_of_the_bytes(operation: str, factor: int) -> None:
    call = Collective(operation, 100, 4, (0, 1, 2, 3), "shard")
    assert call.bytes == 400 and call.ring_bytes == factor * 300


def test_the_table_covers_what_it_promises() -> None:
    assert len(CASES) >= 16
