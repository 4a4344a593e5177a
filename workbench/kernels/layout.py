"""Which blocks of the attention matrix are computed: a CSR block layout.

The attention matrix of ``n`` tokens is cut into square blocks of ``block_size`` tokens. A layout lists the *live*
blocks of every row of blocks; the others are never touched. Two masks finer than a block exist beside it: ``causal``
(the diagonal blocks are lower-triangular) and the last block when ``n`` is no multiple of the block (keys past ``n``
are dead). A live block that one of them cuts is *partial*, every other one is *full*.

Nothing here is of size ``n × n`` except :meth:`BlockLayout.to_dense_mask`, which is for tests and pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from workbench.errors import Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]

_handles = itertools.count(1)
_alive: WeakValueDictionary[int, BlockLayout] = WeakValueDictionary()


@dataclass(frozen=True)
class Csr:
    """Compressed sparse rows over blocks: row ``r`` holds ``indices[pointers[r]:pointers[r + 1]]``.

    Per-head patterns are stacked: head ``h`` owns rows ``h·nb … (h + 1)·nb − 1``. In each row the partial blocks come
    last.
    """

    pointers: NDArray[np.int32]
    indices: NDArray[np.int32]
    partial: NDArray[np.bool_]

    @property
    def counts(self) -> NDArray[np.int32]:
        return np.diff(self.pointers)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The live blocks of an ``n × n`` attention matrix.

    Build one with a function of :mod:`workbench.kernels.layouts`, :meth:`from_pairs` or :meth:`from_dense_mask`.

    Attributes:
        n: tokens.
        block_size: tokens along each side of a block.
        heads: number of per-head patterns, or None when every head shares one.
        causal: whether keys after the query are masked inside the diagonal blocks.
        rows: for every row of blocks (queries) its live columns (keys), ascending.
        handle: a number that no other layout of this process has.
    """

    n: int
    block_size: int
    heads: int | None
    causal: bool
    rows: Csr
    handle: int = field(default_factory=lambda: next(_handles))

    def __post_init__(self) -> None:
        _alive[self.handle] = self

    # ---- construction

    @classmethod
    def from_pairs(
        cls,
        n: int,
        block_size: int,
        rows: ArrayLike,
        columns: ArrayLike,
        *,
        head_of_pair: ArrayLike | None = None,
        heads: int | None = None,
        causal: bool = False,
    ) -> BlockLayout:
        """The layout whose live blocks are ``(rows[i], columns[i])``; duplicates count once.

        Args:
            head_of_pair: the head of each pair, together with ``heads``; None for a pattern that all heads share.
            causal: drop the blocks above the diagonal and mask within those on it.

        Raises:
            Refused: sizes below one, or an index outside the grid of blocks.
        """
        check_sizes(n, block_size)
        nb = -(-n // block_size)
        row, col = np.asarray(rows, dtype=np.int64).ravel(), np.asarray(columns, dtype=np.int64).ravel()
        if row.shape != col.shape:
            raise Refused(f"block pairs with {row.size} rows but {col.size} columns")
        for name, index in (("row", row), ("column", col)):
            if index.size and (index.min() < 0 or index.max() >= nb):
                worst = int(index.min() if index.min() < 0 else index.max())
                raise Refused(f"block {name}", worst, allowed=f"0 … {nb - 1} ({n} tokens in blocks of {block_size})")
        if (heads is None) != (head_of_pair is None):
            raise Refused("heads and head_of_pair go together", fix="give both or neither")
        if head_of_pair is not None:
            row = row + np.asarray(head_of_pair, dtype=np.int64).ravel() * nb
        if causal:
            keep = col <= row % nb
            row, col = row[keep], col[keep]
        keys = row * nb + col
        if not (np.diff(keys) > 0).all():  # sorting would be most of the work where pairs come in order already
            keys = np.unique(keys)
        return cls._from_keys(n, block_size, keys, heads, causal)

    @classmethod
    def _from_keys(cls, n: int, block_size: int, keys: Ints, heads: int | None, causal: bool) -> BlockLayout:
        """From sorted, distinct keys ``(head·nb + row)·nb + column``."""
        nb = -(-n // block_size)
        row, col = np.divmod(keys, nb)
        rows = _csr(row, col, (heads or 1) * nb, _is_partial(row % nb, col, n, block_size, causal))
        return cls(n, block_size, heads, causal, rows)

    @classmethod
    def from_dense_mask(
        cls, mask: torch.Tensor | NDArray[np.bool_], block_size: int = 128, *, cover: bool = False
    ) -> BlockLayout:
        """The layout of a token mask ``(n, n)`` or ``(heads, n, n)``, True where a query may see a key.

        A mask that is the union of whole blocks, or that cut by the causal triangle, is represented exactly.

        Args:
            cover: accept any mask, and make every block live that holds a live token.

        Raises:
            Refused: the mask is not square, or cuts through a block and ``cover`` is False.
        """
        live = torch.as_tensor(mask).bool().cpu().numpy()
        if live.ndim not in (2, 3) or live.shape[-1] != live.shape[-2]:
            raise Refused("dense mask of shape", tuple(live.shape), allowed="(n, n) or (heads, n, n)")
        n = live.shape[-1]
        check_sizes(n, block_size)
        nb = -(-n // block_size)
        stacked = live.reshape(-1, n, n)
        padded = np.zeros((len(stacked), nb * block_size, nb * block_size), dtype=bool)
        padded[:, :n, :n] = stacked
        blocks = padded.reshape(len(stacked), nb, block_size, nb, block_size).any(axis=(2, 4))
        head, row, col = np.nonzero(blocks)
        heads = None if live.ndim == 2 else live.shape[0]
        shared = {} if heads is None else {"head_of_pair": head, "heads": heads}
        whole = cls.from_pairs(n, block_size, row, col, **shared)
        if cover or np.array_equal(whole.to_dense_mask().numpy(), live):
            return whole
        triangular = cls.from_pairs(n, block_size, row, col, causal=True, **shared)
        if np.array_equal(triangular.to_dense_mask().numpy(), live):
            return triangular
        raise Refused(
            f"a mask that cuts through blocks of {block_size} has no block layout",
            allowed="unions of whole blocks, causal or not",
            fix="pass cover=True to make every touched block live, or choose a smaller block",
        )

    @classmethod
    def per_head(cls, layouts: Sequence[BlockLayout]) -> BlockLayout:
        """One pattern per head from ``layouts``, which must agree in ``n``, block size and causality."""
        if not layouts:
            raise Refused("a per-head layout needs at least one head")
        first = layouts[0]
        for other in layouts:
            first._check_same_grid(other)
            if other.heads is not None or other.causal != first.causal:
                raise Refused("per-head patterns must be shared-head layouts, all causal or none")
        keys = np.concatenate([layout._keys() + h * first.num_blocks**2 for h, layout in enumerate(layouts)])
        return cls._from_keys(first.n, first.block_size, keys, len(layouts), first.causal)

    def select_heads(self, start: int, stop: int) -> BlockLayout:
        """The patterns of heads ``start … stop − 1``: a rank's share under tensor parallelism by heads."""
        if self.heads is None:
            return self
        if not 0 <= start < stop <= self.heads:
            raise Refused("head range", (start, stop), allowed=f"within 0 … {self.heads}")
        area = self.num_blocks**2
        keys = self._keys()
        keys = keys[(keys >= start * area) & (keys < stop * area)] - start * area
        return self._from_keys(self.n, self.block_size, keys, stop - start, self.causal)

    # ---- what it says about itself

    @property
    def num_blocks(self) -> int:
        """Blocks along one side of the matrix."""
        return -(-self.n // self.block_size)

    @property
    def nnz(self) -> int:
        """Live blocks, summed over the heads that have a pattern of their own."""
        return int(self.rows.indices.size)

    @property
    def density(self) -> float:
        """Live blocks over all blocks, ρ."""
        return self.nnz / ((self.heads or 1) * self.num_blocks**2)

    @property
    def is_full(self) -> bool:
        """Every block is live, or with ``causal`` every block on and below the diagonal: plain dense attention."""
        nb = self.num_blocks
        return self.nnz == (self.heads or 1) * (nb * (nb + 1) // 2 if self.causal else nb * nb)

    @cached_property
    def columns(self) -> Csr:
        """The transpose: for every column of blocks (keys) the rows (queries) that see it. The backward reads it."""
        nb = self.num_blocks
        row = np.repeat(np.arange(self.rows.counts.size, dtype=np.int64), self.rows.counts)
        head, row = np.divmod(row, nb)
        col = self.rows.indices.astype(np.int64)
        order = np.lexsort((row, self.rows.partial, head * nb + col))
        return _csr((head * nb + col)[order], row[order], (self.heads or 1) * nb, self.rows.partial[order])

    def flops(self, batch: int, heads: int, head_dim: int, *, backward: bool = False) -> float:
        """Operations of the visited blocks: ``4·b·h·d`` per score forward, 2.5 times that backward."""
        forward = 4.0 * batch * heads * head_dim * self.density * (self.num_blocks * self.block_size) ** 2
        return 2.5 * forward if backward else forward

    @property
    def csr_bytes(self) -> int:
        """Bytes of row pointers and column indices, 4·(nb + 1) + 4·nnz for a shared pattern."""
        return self.rows.pointers.nbytes + self.rows.indices.nbytes

    @property
    def dense_mask_bytes(self) -> int:
        """Bytes of the same pattern as a boolean token mask."""
        return (self.heads or 1) * self.n**2

    def compression(self) -> dict[str, float]:
        """What is saved against dense attention, as a share: bytes of the stored mask, and scores computed."""
        return {
            "stored mask bytes": 1 - self.csr_bytes / self.dense_mask_bytes,
            "scores computed": 1 - self.density,
        }

    def to_dense_mask(self) -> torch.Tensor:
        """Token mask ``(n, n)`` or ``(heads, n, n)``, True where a query sees a key. For tests and pictures only."""
        nb = self.num_blocks
        blocks = np.zeros(((self.heads or 1) * nb, nb), dtype=bool)
        blocks[np.repeat(np.arange(len(blocks)), self.rows.counts), self.rows.indices] = True
        mask = torch.from_numpy(blocks).view(-1, nb, nb)
        mask = mask.repeat_interleave(self.block_size, 1).repeat_interleave(self.block_size, 2)
        mask = mask[:, : self.n, : self.n]
        if self.causal:
            mask = mask.tril()
        return mask[0] if self.heads is None else mask

    def draw(self, head: int = 0, *, title: str = "") -> Figure:
        """A picture of the live blocks, at most 512 pixels a side: queries down, keys across."""
        from matplotlib.figure import Figure

        nb = self.num_blocks
        span = slice(head * nb, (head + 1) * nb) if self.heads is not None else slice(0, nb)
        row = np.repeat(np.arange(nb), self.rows.counts[span])
        pointers = self.rows.pointers[span.start : span.stop + 1]
        col = self.rows.indices[pointers[0] : pointers[-1]]
        side = min(nb, 512)
        picture, _, _ = np.histogram2d(row, col, bins=side, range=[[0, nb], [0, nb]])
        figure = Figure(figsize=(3.2, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.imshow(picture > 0, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest", extent=(0, nb, nb, 0))
        axes.set(xlabel="key block", ylabel="query block", title=title or f"{self.density:.1%} of the blocks")
        return figure

    def __repr__(self) -> str:
        pattern = "shared" if self.heads is None else f"{self.heads} heads"
        causal = ", causal" if self.causal else ""
        return (
            f"BlockLayout({self.n} tokens, blocks of {self.block_size}, {pattern}, density {self.density:.3f}{causal})"
        )

    # ---- set operations

    def union(self, other: BlockLayout) -> BlockLayout:
        """Blocks live in either. Both must be causal or neither: half a diagonal block has no block layout."""
        self._check_same_grid(other)
        if self.causal != other.causal:
            raise Refused("the union of a causal and a non-causal layout", fix="intersect both with causal(n) first")
        a, b, heads = self._on_common_heads(other)
        return self._from_keys(self.n, self.block_size, np.union1d(a, b), heads, self.causal)

    def intersection(self, other: BlockLayout) -> BlockLayout:
        """Blocks live in both; causal when one of them is."""
        self._check_same_grid(other)
        a, b, heads = self._on_common_heads(other)
        keys = np.intersect1d(a, b, assume_unique=True)
        return self._from_keys(self.n, self.block_size, keys, heads, self.causal or other.causal)

    def _keys(self) -> Ints:
        row = np.repeat(np.arange(self.rows.counts.size, dtype=np.int64), self.rows.counts)
        return row * self.num_blocks + self.rows.indices

    def _on_common_heads(self, other: BlockLayout) -> tuple[Ints, Ints, int | None]:
        if self.heads == other.heads:
            return self._keys(), other._keys(), self.heads
        if self.heads is not None and other.heads is not None:
            raise Refused(f"layouts of {self.heads} and {other.heads} heads", allowed="equal numbers, or shared")
        heads = self.heads or other.heads
        assert heads is not None
        steps = np.arange(heads, dtype=np.int64)[:, None] * self.num_blocks**2

        def stacked(layout: BlockLayout) -> Ints:
            return layout._keys() if layout.heads else (layout._keys() + steps).ravel()

        return stacked(self), stacked(other), heads

    def _check_same_grid(self, other: BlockLayout) -> None:
        if (self.n, self.block_size) != (other.n, other.block_size):
            raise Refused(
                f"layouts of {self.n} tokens in blocks of {self.block_size} "
                f"and of {other.n} tokens in blocks of {other.block_size} do not combine"
            )


def by_handle(handle: int) -> BlockLayout:
    """The living layout with this handle: how an operator, whose schema knows only numbers, is given one."""
    return _alive[handle]


def check_sizes(n: int, block_size: int) -> None:
    """Raises Refused for sizes no layout can have."""
    if n < 1:
        raise Refused("number of tokens", n, allowed="1 or more")
    if block_size < 16 or block_size & (block_size - 1):
        raise Refused("block_size", block_size, allowed="a power of two, 16 or more (the GPU kernels take 64 and 128)")


def _is_partial(row: Ints, col: Ints, n: int, block_size: int, causal: bool) -> NDArray[np.bool_]:
    """True for the blocks that the causal triangle or the end of the sequence cuts."""
    ragged = col == n // block_size if n % block_size else np.zeros(col.shape, dtype=bool)
    return ragged | (row == col) if causal else ragged


def _csr(row: Ints, col: Ints, num_rows: int, partial: NDArray[np.bool_]) -> Csr:
    """CSR of pairs that are already in row order."""
    assert row.size < 2**31, "more live blocks than 32-bit pointers can count"
    pointers = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=pointers[1:])
    return Csr(pointers.astype(np.int32), col.astype(np.int32), partial)
