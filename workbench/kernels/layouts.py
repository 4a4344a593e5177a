"""Builders of block layouts. Each takes ``(n, block_size=128, …)``; distances are counted in blocks.

Sources: local, strided and fixed patterns from Sparse Transformers (Child et al. 2019), here in both directions and in
blocks; window + global from Longformer (Beltagy et al. 2020); random from BigBird (Zaheer et al. 2020); 2-D
neighbourhoods and their dilation from Neighborhood Attention (Hassani et al. 2023). A *token* stride of √n would
touch every block as long as n ≤ block², so strides are in blocks.
"""

import numpy as np
from numpy.typing import NDArray

from workbench.errors import Refused
from workbench.kernels.layout import BlockLayout, Ints, check_sizes


def full(n: int, block_size: int = 128) -> BlockLayout:
    """Every block: dense attention."""
    every = np.arange(_num_blocks(n, block_size))
    rows, cols = _cross(every, every)
    return BlockLayout.from_pairs(n, block_size, rows, cols)


def causal(n: int, block_size: int = 128) -> BlockLayout:
    """Every key up to the query. Intersect another layout with it to make that one causal."""
    rows, cols = np.tril_indices(_num_blocks(n, block_size))
    return BlockLayout.from_pairs(n, block_size, rows, cols, causal=True)


def local(n: int, block_size: int = 128, *, radius: int = 2) -> BlockLayout:
    """Key blocks at most ``radius`` blocks away, on both sides."""
    nb = _num_blocks(n, block_size)
    rows, cols = _band(nb, _at_least(0, "radius", radius))
    return BlockLayout.from_pairs(n, block_size, rows, cols)


def strided(n: int, block_size: int = 128, *, stride: int | None = None, radius: int | None = None) -> BlockLayout:
    """A window and every ``stride``-th column; by default stride = √nb, radius = stride / 2: cost grows as n^1.5."""
    nb = _num_blocks(n, block_size)
    stride = _root(nb) if stride is None else _at_least(1, "stride", stride)
    radius = stride // 2 if radius is None else _at_least(0, "radius", radius)
    band, columns = _band(nb, radius), _cross(np.arange(nb), np.arange(stride - 1, nb, stride))
    return _joined(n, block_size, band, columns)


def fixed(n: int, block_size: int = 128, *, stride: int | None = None) -> BlockLayout:
    """Blocks of the same group of ``stride``, and the last column of every group; by default stride = √nb."""
    nb = _num_blocks(n, block_size)
    stride = _root(nb) if stride is None else _at_least(1, "stride", stride)
    rows, cols = _cross(np.arange(nb), np.arange(stride))
    cols = cols + rows // stride * stride
    inside = cols < nb
    columns = _cross(np.arange(nb), np.arange(stride - 1, nb, stride))
    return _joined(n, block_size, (rows[inside], cols[inside]), columns)


def window_global(n: int, block_size: int = 128, *, radius: int = 2, global_blocks: int = 1) -> BlockLayout:
    """A window, and ``global_blocks`` leading blocks that see and are seen by everything."""
    nb = _num_blocks(n, block_size)
    first = np.arange(min(_at_least(0, "global_blocks", global_blocks), nb))
    every = np.arange(nb)
    return _joined(n, block_size, _band(nb, _at_least(0, "radius", radius)), _cross(every, first), _cross(first, every))


def random(n: int, block_size: int = 128, *, blocks_per_row: int = 3, seed: int = 0) -> BlockLayout:
    """The diagonal and up to ``blocks_per_row`` random columns per row (drawn with replacement, duplicates merge)."""
    nb = _num_blocks(n, block_size)
    every = np.arange(nb)
    drawn = np.random.default_rng(seed).integers(nb, size=(nb, _at_least(0, "blocks_per_row", blocks_per_row)))
    return _joined(n, block_size, (every, every), (np.repeat(every, drawn.shape[1]), drawn.ravel()))


def grid_2d(
    n: int,
    block_size: int = 128,
    *,
    height: int,
    width: int,
    radius: int = 8,
    special_tokens: int = 0,
    tile: tuple[int, int] | None = None,
) -> BlockLayout:
    """A square window of ``radius`` *patches* on an image of ``height × width`` patches.

    Tokens are expected in :func:`tile_order`: patches tile by tile, then the class and register tokens, whose blocks
    are global. A block is live where any of its patches has a neighbour in the other block.

    Args:
        special_tokens: class and register tokens; ``n`` must equal ``height·width + special_tokens``.
        tile: patches per tile (height, width); by default as square as ``block_size`` allows, 8×16 for 128.
    """
    return dilated_2d(
        n, block_size, height=height, width=width, radius=radius, dilation=1, special_tokens=special_tokens, tile=tile
    )


def dilated_2d(
    n: int,
    block_size: int = 128,
    *,
    height: int,
    width: int,
    radius: int = 4,
    dilation: int = 8,
    special_tokens: int = 0,
    tile: tuple[int, int] | None = None,
) -> BlockLayout:
    """As :func:`grid_2d`, with neighbours at multiples of ``dilation`` patches, up to ``radius`` multiples away."""
    if height < 1 or width < 1 or special_tokens < 0 or n != height * width + special_tokens:
        raise Refused(
            "number of tokens", n, allowed=f"{height}×{width} patches + {special_tokens} special tokens, all positive"
        )
    nb = _num_blocks(n, block_size)
    _at_least(0, "radius", radius)
    _at_least(1, "dilation", dilation)
    patches = tile_order(height, width, block_size, tile=tile)
    y, x = np.divmod(patches, width)
    num_patch_blocks = -(-patches.size // block_size)
    starts = np.arange(num_patch_blocks) * block_size
    boxes = [(np.minimum.reduceat(axis, starts), np.maximum.reduceat(axis, starts)) for axis in (y, x)]
    slab = max(1, 2**22 // num_patch_blocks)  # rows at a time, so that memory stays bounded at a million tokens
    near = []
    for begin in range(0, num_patch_blocks, slab):
        some = slice(begin, begin + slab)
        live = _reaches(boxes[0], some, radius, dilation) & _reaches(boxes[1], some, radius, dilation)
        rows, cols = np.nonzero(live)
        near.append((rows + begin, cols))
    special = np.arange(height * width // block_size, nb) if special_tokens else np.arange(0)
    every = np.arange(nb)
    return _joined(n, block_size, *near, _cross(every, special), _cross(special, every))


def tile_order(
    height: int, width: int, block_size: int = 128, *, special_tokens: int = 0, tile: tuple[int, int] | None = None
) -> Ints:
    """The permutation that makes 2-D neighbours share blocks: ``x_tiled = x[:, order]``, undone by ``argsort(order)``.

    The incoming sequence is ``special_tokens`` tokens followed by the patches row by row, as vision transformers have
    it. The outgoing one has the patches tile by tile, then the special tokens.
    """
    if tile is None:
        side = 1 << (block_size.bit_length() - 1) // 2
        tile = (side, block_size // side)
    y, x = np.divmod(np.arange(height * width, dtype=np.int64), width)
    order = np.lexsort((x, y, x // tile[1], y // tile[0]))
    return np.concatenate([order + special_tokens, np.arange(special_tokens)])


def _reaches(box: tuple[Ints, Ints], rows: slice, radius: int, dilation: int) -> NDArray[np.bool_]:
    """Along one axis: does some multiple k·dilation, |k| ≤ radius, lead from block i's span into block j's?"""
    low, high = box
    least = np.ceil((low[None, :] - high[rows, None]) / dilation)
    most = np.floor((high[None, :] - low[rows, None]) / dilation)
    return np.maximum(least, -radius) <= np.minimum(most, radius)


def _num_blocks(n: int, block_size: int) -> int:
    check_sizes(n, block_size)
    return -(-n // block_size)


def _root(nb: int) -> int:
    return max(1, round(nb**0.5))


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise Refused(name, value, allowed=f"{least} or more")
    return value


def _cross(rows: Ints, cols: Ints) -> tuple[Ints, Ints]:
    return np.repeat(rows, cols.size), np.tile(cols, rows.size)


def _band(nb: int, radius: int) -> tuple[Ints, Ints]:
    rows, offsets = _cross(np.arange(nb), np.arange(-min(radius, nb), min(radius, nb) + 1))
    cols = rows + offsets
    inside = (cols >= 0) & (cols < nb)
    return rows[inside], cols[inside]


def _joined(n: int, block_size: int, *pairs: tuple[Ints, Ints]) -> BlockLayout:
    rows, cols = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return BlockLayout.from_pairs(n, block_size, rows, cols)
