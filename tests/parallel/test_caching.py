"""The allocator's rules, by hand; and what must hold whatever is asked of it."""

import random

import pytest

from workbench.parallel.caching import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB + MIB // 2, 10 * MIB + MIB // 2, 12 * MIB),  # more than 1 MiB is left of the segment, and split off
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # less is left, and goes along
        (19 * MIB, 20 * MIB, 20 * MIB),
    ],
)
def test_a_single_block_takes_what_the_rules_say(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_an_empty_tensor_takes_nothing() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(0))
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_small_blocks_share_a_segment_and_the_smallest_that_fits_is_reused() -> None:
    allocator = CachingAllocator()
    large, _, small, _ = [allocator.allocate(size) for size in (8192, 512, 4096, 512)]
    assert allocator.reserved == 2 * MIB
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(4000) is small


def test_free_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB) for _ in range(2)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(2 * MIB - 512 * 1024) is not None  # large pool: cannot use them
    assert allocator.reserved == 22 * MIB
    for _ in range(2):
        allocator.allocate(MIB)
    assert allocator.reserved == 22 * MIB


def test_a_stream_has_segments_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(MIB, stream=0))
    allocator.allocate(MIB, stream=1)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_and_everything_comes_back(seed: int) -> None:
    draw, allocator = random.Random(seed), CachingAllocator()
    live: list[tuple[int, object]] = []
    for _ in range(2000):
        if live and draw.random() < 0.5:
            allocator.release(live.pop(draw.randrange(len(live)))[1])  # type: ignore[arg-type]
        else:
            size = int(2 ** draw.uniform(0, 26))
            live.append((size, allocator.allocate(size, draw.randrange(2))))
        asked = sum(size for size, _ in live)
        assert asked <= allocator.allocated <= allocator.reserved
        assert allocator.allocated <= asked + len(live) * MIB + 512 * len(live)
    reserved = allocator.reserved
    for _, block in live:
        allocator.release(block)  # type: ignore[arg-type]
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    free = [size for pool in allocator._free.values() for size, _ in pool]
    assert sum(free) == reserved
    assert all(size % (2 * MIB) == 0 for size in free), "a segment stayed in pieces"
