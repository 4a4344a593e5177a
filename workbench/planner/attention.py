"""Density, FLOPs and bytes of attention, dense and block-sparse, by formula.

Symbols: b batch, h heads, n tokens, d head_dim, B tokens along a block's side, nb = n/B blocks along the matrix' side.
"""

import math
from collections.abc import Callable
from typing import Any

LSE_BYTES = 4
"""Of the log-sum-exp that a fused kernel keeps per row, in fp32 whatever the inputs are."""


def density(pattern: str, n: int, block_size: int = 128, **options: Any) -> float:
    """Live blocks over all blocks. 1 for what is no pattern, and for a choice by mass, which only the input decides.

    Exact for ``local``, ``window_global``, ``strided``, ``fixed`` and ``causal``; the expectation for ``random``; for 2-D windows
    the count away from the image's edge, so an upper bound; for ``adaptive`` with ``top_k`` that many and the diagonal, likewise.
    """
    nb = -(-n // block_size)
    if pattern == "causal":
        return (nb + 1) / (2 * nb)
    counts: dict[str, Callable[..., float]] = {
        "local": _local, "window_global": _window_global, "strided": _strided, "fixed": _fixed, "random": _random,
        "grid_2d": _grid_2d, "dilated_2d": _dilated_2d, "adaptive": _adaptive,
    }  # fmt: skip
    known = counts.get(pattern)
    if known is None:
        return 1.0
    given = {k: v for k, v in options.items() if k != "backend"}
    extra = {"block_size": block_size} if pattern in ("grid_2d", "dilated_2d") else {}
    return min(known(nb, **given, **extra) / nb**2, 1.0)


def attention_flops(
    batch: int, heads: int, n: int, head_dim: int, live: float = 1.0, *, backward: bool = True
) -> float:
    """``4·b·h·n²·d`` forward times the density; the backward pass of a fused kernel takes 2.5 times that besides."""
    return 4.0 * batch * heads * n * n * head_dim * live * (3.5 if backward else 1.0)


def score_bytes(batch: int, heads: int, n: int, value_bytes: int) -> int:
    """One copy of the scores, ``b·h·n²`` values: what eager attention keeps for its backward pass."""
    return batch * heads * n * n * value_bytes


def fused_bytes(batch: int, heads: int, n: int, head_dim: int, value_bytes: int) -> int:
    """What a fused kernel keeps besides q, k and v: the output and a log-sum-exp per row. Nothing grows as n²."""
    return batch * heads * n * (head_dim * value_bytes + LSE_BYTES)


def claimed_mebibytes(n: int, heads: int, params: float) -> float:
    """The case study's formula, n²·h·params·4/1024². Its dimensions are wrong: a head's scores are n² values, whatever made them.

    12.8 GB at n = 2048 asks for heads · "params" = 800: with 16 heads that is 50, a batch, and no number of parameters.
    """
    return n * n * heads * params * 4 / 1024**2


def csr_bytes(n: int, block_size: int, live: float) -> float:
    """``4·(nb + 1) + 4·nnz``, where a boolean token mask takes n²."""
    nb = -(-n // block_size)
    return 4 * (nb + 1) + 4 * live * nb**2


def work_exponent(lengths: list[int], densities: list[float]) -> float:
    """The power of n with which n²·density grows from the shortest to the longest."""
    work = [n * n * live for n, live in zip(lengths, densities, strict=True)]
    return math.log(work[-1] / work[0]) / math.log(lengths[-1] / lengths[0])


def _local(nb: int, radius: int = 2) -> float:
    r = min(radius, nb - 1)
    return nb * (2 * r + 1) - r * (r + 1)


def _window_global(nb: int, radius: int = 2, global_blocks: int = 1) -> float:
    rest = nb - min(global_blocks, nb)
    return nb**2 - rest**2 + (_local(rest, radius) if rest else 0)


def _strided(nb: int, stride: int | None = None, radius: int | None = None) -> float:
    stride = max(1, round(nb**0.5)) if stride is None else stride
    radius = stride // 2 if radius is None else radius
    columns = range(stride - 1, nb, stride)
    shared = sum(min(nb - 1, c + radius) - max(0, c - radius) + 1 for c in columns)
    return _local(nb, radius) + nb * len(columns) - shared


def _fixed(nb: int, stride: int | None = None) -> float:
    stride = max(1, round(nb**0.5)) if stride is None else stride
    groups, rest = divmod(nb, stride)
    return groups * stride**2 + rest**2 + nb * groups - stride * groups


def _random(nb: int, blocks_per_row: int = 3, seed: int = 0) -> float:
    return nb * (1 + (nb - 1) * (1 - (1 - 1 / nb) ** blocks_per_row))


def _grid_2d(nb: int, block_size: int, radius: int = 8, tile: tuple[int, int] | None = None, **image: int) -> float:
    return _dilated_2d(nb, block_size, radius=radius, dilation=1, tile=tile, **image)


def _dilated_2d(
    nb: int, block_size: int, radius: int = 4, dilation: int = 8, tile: tuple[int, int] | None = None, **image: int
) -> float:
    side = 1 << (block_size.bit_length() - 1) // 2
    reach = [1 + 2 * math.ceil(radius * dilation / t) for t in tile or (side, block_size // side)]
    special = -(-image.get("special_tokens", 0) // block_size)
    return nb * reach[0] * reach[1] + 2 * nb * special


def _adaptive(nb: int, top_k: int | None = None, mass: float | None = None, **rest: Any) -> float:
    return nb * min(nb, top_k + 1) if top_k else nb**2
