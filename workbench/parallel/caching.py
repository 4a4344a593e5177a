"""A model of PyTorch's caching allocator: from sizes asked for to bytes allocated and reserved.

Rules as in ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings: sizes in multiples of 512 bytes; a small pool up
to 1 MiB in segments of 2 MiB; a large one in segments of 20 MiB, or of the size rounded up to 2 MiB from 10 MiB on; pools per
stream; the smallest free block that fits; a large block is split only when more than 1 MiB is left; free neighbours are merged.
The memory is without end: nothing is ever given back to the driver.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

MIB = 2**20
ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE, LARGE_SEGMENT, LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours there."""

    size: int
    pool: tuple[Any, bool]
    number: int
    """Stands for the address: among blocks of one size the oldest is taken first."""
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.number


class CachingAllocator:
    """Bytes that ``torch.cuda.memory_allocated`` and ``memory_reserved`` would report, for one device.

    Attributes:
        allocated: bytes in blocks in use, which is more than was asked for.
        reserved: bytes in segments.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._blocks = 0
        self._free: dict[tuple[Any, bool], list[tuple[int, int]]] = {}
        self._by_number: dict[int, Block] = {}

    def allocate(self, num_bytes: int, stream: Any = 0) -> Block | None:
        """A block of at least ``num_bytes`` for tensors of ``stream``; ``None`` for an empty tensor, which gets no memory."""
        if num_bytes == 0:
            return None
        size = _round(num_bytes, ROUND)
        small = size <= SMALL
        block = self._take((stream, small), size) or self._segment((stream, small), size)
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def release(self, block: Block | None) -> None:
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block = _merge(block, other)
        self._add(block)

    def _take(self, pool: tuple[Any, bool], size: int) -> Block | None:
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, -1))
        return self._by_number.pop(free.pop(at)[1]) if at < len(free) else None

    def _segment(self, pool: tuple[Any, bool], size: int) -> Block:
        total = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else _round(size, LARGE_ROUND)
        self.reserved += total
        return self._block(total, pool)

    def _block(self, size: int, pool: tuple[Any, bool]) -> Block:
        self._blocks += 1
        return Block(size, pool, self._blocks)

    def _split(self, block: Block, size: int) -> None:
        rest = self._block(block.size - size, block.pool)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._add(rest)

    def _add(self, block: Block) -> None:
        insort(self._free.setdefault(block.pool, []), block.key)
        self._by_number[block.number] = block

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, block.key)]
        del self._by_number[block.number]


def _merge(block: Block, other: Block) -> Block:
    """One free block of two neighbours; the one that lies before the other stays."""
    first, second = (other, block) if other is block.before else (block, other)
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    first.free = True
    return first


def _round(size: int, to: int) -> int:
    return -(-size // to) * to
