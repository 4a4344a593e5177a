"""Our Triton kernels: natively on a GPU, in Triton's interpreter without one.

The interpreter rounds to bf16 by truncation and its bf16 product is wrong, so bf16 is held to the gate on GPUs only.
"""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.kernels.numerics import DEVICE, assert_as_good_as_dense, draw, relative_error, run
from tests.kernels.test_layout import random_layout
from workbench.errors import Refused
from workbench.kernels import layouts, schedule, triton_op
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.layout import BlockLayout

ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16, torch.float32]
HEAD_DIMS = [32, 40, 64, 72, 80, 96, 128]


@pytest.fixture(autouse=True)
def short_items(monkeypatch):
    """Rows are split from two blocks on, so that small tests take the path of long rows."""
    monkeypatch.setattr(schedule, "SHORTEST_ITEM", 1)
    monkeypatch.setattr("workbench.kernels.triton_forward.num_processors", lambda device: 64)
    monkeypatch.setattr("workbench.kernels.triton_backward.num_processors", lambda device: 64)


@pytest.fixture(params=[False, True] if ON_GPU else [False], ids=lambda on: "lowered" if on else "portable")
def lowered(request, monkeypatch):
    """The portable kernels, and on a GPU also those lowered for Hopper, where there is one and they can."""
    monkeypatch.setattr(triton_op, "USE_LOWERED", request.param)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 260 if ON_GPU else 200),
    block=st.sampled_from([64, 128]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    per_head=st.booleans(),
)
@example(seed=2114, n=65, block=64, head_dim=32, dtype=torch.float16, causal=False, per_head=False)
@settings(max_examples=60 if ON_GPU else 4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_and_pattern_is_as_exact_as_dense_attention(seed, n, block, head_dim, dtype, causal, per_head):
    layout = random_layout(seed, n, block, causal=causal, heads=2 if per_head else None)
    assert_as_good_as_dense(draw((2, 2, n, head_dim), dtype, seed), layout, "triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(head_dim, dtype):
    assert_as_good_as_dense(draw((1, 1, 128, head_dim), dtype), layouts.window_global(128, 64, radius=0), "triton")


FAULTS = {
    "n not a multiple of the block": (layouts.local(170, 64, radius=1), 170),
    "one dense row and column among sparse ones": (layouts.window_global(320, 64, radius=0), 320),
    "empty rows and columns": (BlockLayout.from_pairs(320, 64, [0, 2, 2], [1, 1, 4]), 320),
    "no block at all": (BlockLayout.from_pairs(128, 64, [], []), 128),
    "causal with a ragged end": (layouts.causal(200, 64), 200),
    "a pattern per head": (BlockLayout.per_head([layouts.local(256, 64, radius=r) for r in (0, 3)]), 256),
    "one token": (layouts.full(1, 64), 1),
    "blocks of 128": (layouts.local(256, 128, radius=1), 256),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_awkward_patterns_forward_and_backward(fault, lowered):
    layout, n = FAULTS[fault]
    assert_as_good_as_dense(draw((1, layout.heads or 1, n, 64), DTYPES[0]), layout, "triton")


def test_rows_without_keys_and_keys_without_rows_give_exact_zeros():
    layout = BlockLayout.from_pairs(256, 64, [0, 2], [1, 1])
    tensors = draw((1, 2, 256, 32), DTYPES[0])
    out, dq, dk, dv = run(tensors, layout, "triton")
    for value in (out, dq):
        assert not value[:, :, 64:128].any() and not value[:, :, 192:].any() and value[:, :, :64].any()
    for value in (dk, dv):
        assert not value[:, :, :64].any() and not value[:, :, 128:].any() and value[:, :, 64:128].any()
    _, lse = block_sparse_attention(*tensors[:3], layout, return_lse=True, backend="triton")
    assert torch.isneginf(lse[:, :, 64:128]).all()


def test_views_of_a_packed_projection_are_read_where_they_lie():
    packed = torch.randn(2, 128, 3, 2, 32, device=DEVICE, dtype=DTYPES[0])
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    grad = torch.randn(2, 128, 2, 32, device=DEVICE, dtype=DTYPES[0]).transpose(1, 2)
    layout = layouts.local(128, 64, radius=1)
    assert not q.is_contiguous()
    assert_as_good_as_dense((q, k, v, grad), layout, "triton")


def test_strides_inside_a_row_and_expanded_gradients_are_accepted():
    q, k, v, _ = (x[..., ::2] for x in draw((1, 2, 128, 64), DTYPES[0]))
    grad = torch.ones(1, 1, 1, 1, device=DEVICE, dtype=DTYPES[0]).expand_as(q)
    assert_as_good_as_dense((q, k, v, grad), layouts.local(128, 64, radius=1), "triton")


def test_the_log_sum_exp_and_its_gradient():
    layout = layouts.window_global(192, 64, radius=0)
    q, k, v, _ = draw((1, 1, 192, 32), DTYPES[0])
    grads = []
    for backend in ("triton", "reference"):
        x = [t.clone().to(torch.float64 if backend == "reference" else t.dtype).requires_grad_() for t in (q, k, v)]
        out, lse = block_sparse_attention(*x, layout, return_lse=True, backend=backend)
        grads.append([lse, *torch.autograd.grad((out.double() * 0.5).sum() + (lse.double() ** 2).sum(), x)])
    for value, exact in zip(*grads, strict=True):
        assert relative_error(value, exact) < 2e-3


def test_large_logits_neither_overflow_nor_lose_the_maximum():
    tensors = [x * 20 for x in draw((1, 1, 192, 64), DTYPES[0])]
    assert_as_good_as_dense(tensors, layouts.local(192, 64, radius=1), "triton")


def test_the_deterministic_backward_repeats_bit_by_bit():
    tensors = draw((1, 1, 256, 32), DTYPES[0])
    layout = layouts.window_global(256, 64, radius=0)
    first, second = (run(tensors, layout, "triton", deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_operator_passes_pytorchs_own_checks():
    layout = layouts.window_global(128, 64, radius=0)
    q, k, v, _ = draw((1, 1, 128, 32), DTYPES[0])
    arguments = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), layout.handle, 0.2, False)
    torch.library.opcheck(torch.ops.workbench.block_sparse_attention.default, arguments)


def test_compile_recomputation_and_autocast_change_nothing():
    layout = layouts.window_global(192, 64, radius=0)
    q, k, v, grad = draw((1, 2, 192, 32), DTYPES[0])
    expected = run((q, k, v, grad), layout, "triton")
    x = [t.requires_grad_() for t in (q, k, v)]

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, layout, backend="triton")

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    recomputed = lambda *x: checkpoint(attend, *x, use_reentrant=False)  # noqa: E731
    for function in (compiled, recomputed):
        out = function(*x)
        for value, truth in zip([out, *torch.autograd.grad(out, x, grad)], expected, strict=True):
            assert torch.equal(value, truth)
    full = [t.detach().float().requires_grad_() for t in x]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = attend(*full)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, full, grad.bfloat16())
    assert all(
        g.dtype == torch.float32 and relative_error(g, e.double()) < 0.02
        for g, e in zip(gradients, expected[1:], strict=True)
    )


def test_a_new_layout_is_no_reason_to_compile_again():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    attend = torch.compile(
        lambda q, k, v, layout: block_sparse_attention(q, k, v, layout, backend="triton"), backend=count, fullgraph=True
    )
    q, k, v, _ = draw((1, 1, 192, 32), DTYPES[0])
    for radius in (0, 1, 2, 0):
        layout = layouts.window_global(192, 64, radius=radius)
        exact = block_sparse_attention(q, k, v, layout, backend="triton")
        assert torch.equal(attend(q, k, v, layout), exact)
    assert len(graphs) <= 2


def test_offsets_past_two_to_the_31_are_reached():
    """The last of 2³¹ + … elements, through strides: only what is touched is resident."""
    n, d, stride = 64, 32, 2**25 + 64
    storage = torch.empty(n * stride + d, dtype=torch.float16, device=DEVICE)
    q = storage.as_strided((1, 1, n, d), (0, 0, stride, 1))
    k, v, x, _ = draw((1, 1, n, d), torch.float16)
    q.copy_(x)
    layout = layouts.full(n, 64)
    out = block_sparse_attention(q, k, v, layout, backend="triton")
    assert torch.equal(out.contiguous(), block_sparse_attention(x, k, v, layout, backend="triton"))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block"),
    [(torch.float64, 32, 64), (torch.float16, 256, 64), (torch.float16, 20, 64), (torch.float16, 32, 32)],
)
def test_what_the_kernels_do_not_compute_is_refused(dtype, head_dim, block):
    x = torch.zeros(1, 1, 128, head_dim, dtype=dtype, device=DEVICE)
    with pytest.raises(Refused):
        block_sparse_attention(x, x, x, layouts.local(128, block), backend="triton")
