"""What only a GPU can show of the kernels: real shapes in both half precisions, portable and lowered for Hopper.

pytest tests/kernels -q
"""

from collections.abc import Callable

import pytest
import torch

from workbench.kernels import layouts, triton_op
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.choice import lowered_compute
from workbench.kernels.gate import check, passes
from workbench.kernels.layout import BlockLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
HALVES = [torch.float16, torch.bfloat16]


def whole_blocks(block: int) -> dict[str, BlockLayout]:
    n = 16 * block
    mixed = [layouts.local(n, block), layouts.window_global(n, block), layouts.random(n, block)]
    return {
        "window + global": layouts.window_global(n, block),
        "per head": BlockLayout.per_head(mixed),
        "empty rows and columns": BlockLayout.from_pairs(n, block, [0, 2, 5, 15], [1, 1, 3, 15]),
        "per head, one empty": BlockLayout.from_pairs(n, block, [0, 3, 3], [2, 0, 9], head_of_pair=[0, 0, 2], heads=3),
        "one dense row and column": layouts.window_global(n, block, radius=0),
        "no block at all": BlockLayout.from_pairs(n, block, [], []),
    }


def cut_blocks(block: int) -> dict[str, BlockLayout]:
    n = 16 * block - 77
    last = -(-n // block) - 1
    return {
        "strided, ragged": layouts.strided(n, block),
        "per head, ragged": BlockLayout.per_head([layouts.local(n, block, radius=r) for r in (0, 3)]),
        "causal, ragged": layouts.causal(n, block),
        "empty rows, ragged": BlockLayout.from_pairs(n, block, [0, 2, last], [last, 1, last]),
    }


def draw(layout: BlockLayout, head_dim: int, dtype: torch.dtype, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(layout.n + head_dim)
    shape = (batch, layout.heads or 2, layout.n, head_dim)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in range(4)]


def ours(layout: BlockLayout, **options: bool) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: block_sparse_attention(q, k, v, layout, backend="triton", **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("block", [64, 128])
def test_the_portable_kernels_are_as_exact_as_dense_attention(block, head_dim, dtype, monkeypatch):
    """Each dtype takes half of the patterns, turn by turn: compiling them is what takes the time."""
    monkeypatch.setattr(triton_op, "USE_LOWERED", False)
    turn = (HALVES.index(dtype) + head_dim // 8 + block // 64) % 2
    chosen = [list(kind(block).items())[turn::2] for kind in (whole_blocks, cut_blocks)]
    for name, layout in chosen[0] + chosen[1]:
        found = check(ours(layout), layout, draw(layout, head_dim, dtype))
        assert found.passed, f"{name}: {found}"


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", whole_blocks(128))
def test_the_kernels_lowered_for_hopper_are_as_exact_as_dense_attention(pattern, head_dim, dtype):
    layout = whole_blocks(128)[pattern]
    tensors = draw(layout, head_dim, dtype)
    assert lowered_compute(layout, head_dim) and triton_op._is_lowered(tensors[0], layout)
    found = check(ours(layout), layout, tensors)
    assert found.passed, str(found)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_rows_that_are_split_are_as_exact(head_dim):
    """At 16k tokens the dense row has more blocks than one item may hold, at the real bounds."""
    layout = layouts.window_global(16384)
    found = check(ours(layout), layout, draw(layout, head_dim, torch.bfloat16, batch=1))
    assert found.passed, str(found)


@pytest.mark.parametrize("lowered", [False, True], ids=["portable", "lowered"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_deterministic_backward_repeats_bit_by_bit(head_dim, lowered, monkeypatch):
    monkeypatch.setattr(triton_op, "USE_LOWERED", lowered)
    layout = layouts.window_global(2048)
    tensors = draw(layout, head_dim, torch.bfloat16)
    first, second = (passes(ours(layout, deterministic=True), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rows_and_columns_without_blocks_are_exact_zeros(head_dim):
    layout = whole_blocks(128)["empty rows and columns"]
    out, dq, dk, dv = passes(ours(layout), draw(layout, head_dim, torch.bfloat16))
    for value, live in ((out, {0, 2, 5, 15}), (dq, {0, 2, 5, 15}), (dk, {1, 3, 15}), (dv, {1, 3, 15})):
        nonzero = value.unflatten(2, (16, 128)).abs().amax((0, 1, 3, 4)) > 0
        assert set(nonzero.nonzero().flatten().tolist()) == live
