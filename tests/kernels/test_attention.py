import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.numerics import DEVICE, assert_as_good_as_dense, draw, run
from tests.kernels.test_layout import random_layout
from workbench.errors import Refused
from workbench.kernels import choice, layouts
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.choice import choose
from workbench.kernels.layout import BlockLayout

PATTERNS = {
    "window": layouts.window_global(100, 16, radius=1),
    "causal": layouts.strided(100, 16).intersection(layouts.causal(100, 16)),
    "per head": BlockLayout.per_head([layouts.local(100, 16, radius=r) for r in (0, 2)]),
    "full": layouts.full(100, 16),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["reference", "dense"])
def test_backends_agree_with_a_softmax_over_the_dense_mask(pattern, backend):
    layout = PATTERNS[pattern]
    tensors = draw((2, 2, 100, 24), torch.float64)
    q, k, v, grad = tensors
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~layout.to_dense_mask().to(DEVICE), float("-inf"))
    exact = scores.softmax(-1) @ v
    exact = [exact, *torch.autograd.grad(exact, (q, k, v), grad)]
    for value, truth in zip(run(tensors, layout, backend, scale=0.3), exact, strict=True):
        torch.testing.assert_close(value, truth)
    _, lse = block_sparse_attention(q, k, v, layout, scale=0.3, return_lse=True, backend=backend)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_as_exact_as_dense_attention(pattern, dtype):
    assert_as_good_as_dense(draw((2, 2, 100, 24), dtype), PATTERNS[pattern], "reference")


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 150),
    block=st.sampled_from([16, 32, 64]),
    head_dim=st.sampled_from([8, 24, 40, 64, 72, 80, 96, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    causal=st.booleans(),
    per_head=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_the_reference_is_as_exact_as_dense_attention_on_any_shape_and_pattern(
    seed, n, block, head_dim, dtype, causal, per_head
):
    layout = random_layout(seed, n, block, causal=causal, heads=2 if per_head else None)
    assert_as_good_as_dense(draw((2, 2, n, head_dim), dtype, seed), layout, "reference")


@pytest.mark.skipif(DEVICE == "cuda", reason="the compiled FlexAttention of a GPU takes blocks of 128")
@pytest.mark.parametrize("pattern", ["window", "causal", "per head"])
def test_flex_attention_is_given_the_same_pattern(pattern):
    q, k, v, _ = draw((2, 2, 100, 24), torch.float32)
    layout = PATTERNS[pattern]
    with torch.no_grad():
        out, lse = block_sparse_attention(q, k, v, layout, return_lse=True, backend="flex")
        exact, exact_lse = block_sparse_attention(q, k, v, layout, return_lse=True, backend="reference")
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, exact_lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "dense"])
def test_a_row_without_keys_gives_zero_and_zero_gradients(backend):
    layout = BlockLayout.from_pairs(100, 16, [0, 2], [1, 1])
    tensors = draw((1, 2, 100, 24), torch.float32)
    out, dq, dk, dv = run(tensors, layout, backend)
    for value in (out, dq):
        assert not value[:, :, 16:32].any() and value[:, :, :16].any()
    for value in (dk, dv):
        assert not value[:, :, :16].any() and value[:, :, 16:32].any()
    _, lse = block_sparse_attention(*tensors[:3], layout, return_lse=True, backend=backend)
    assert torch.isneginf(lse[:, :, 16:32]).all() and torch.isfinite(lse[:, :, :16]).all()


@pytest.mark.parametrize("backend", ["reference", "dense"])
def test_a_layout_without_any_block_gives_zeros(backend):
    layout = BlockLayout.from_pairs(100, 16, [], [])
    assert not any(value.any() for value in run(draw((1, 2, 100, 24), torch.float32), layout, backend))


LAYOUT = layouts.local(100, 16)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(1, 2, 100, 24), (1, 2, 90, 24), (1, 2, 100, 24)], ["(1, 2, 100, 24)", "(1, 2, 90, 24)", "k"]),
        ([(1, 2, 100, 24), (1, 2, 100, 24), (1, 2, 100, 32)], ["(1, 2, 100, 24)", "(1, 2, 100, 32)", "v"]),
        ([(2, 100, 24)] * 3, ["(2, 100, 24)", "batch"]),
        ([(1, 2, 128, 24)] * 3, ["128", "100"]),
        ([(0, 2, 100, 24)] * 3, ["(0, 2, 100, 24)"]),
    ],
)
def test_shapes_that_do_not_fit_are_named_on_both_sides(shapes, words):
    with pytest.raises(ValueError) as error:
        block_sparse_attention(*(torch.zeros(s) for s in shapes), LAYOUT)
    assert all(word in str(error.value) for word in words)


def test_other_mismatches_are_refused_by_name():
    x = torch.zeros(1, 2, 100, 24)
    per_head = BlockLayout.per_head([LAYOUT] * 3)
    with pytest.raises(ValueError, match=r"float32.*float16"):
        block_sparse_attention(x, x.half(), x, LAYOUT)
    with pytest.raises(ValueError, match=r"cpu.*meta"):
        block_sparse_attention(x, x, x.to("meta"), LAYOUT)
    with pytest.raises(ValueError, match=r"2 heads.*3"):
        block_sparse_attention(x, x, x, per_head)
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        block_sparse_attention(x, x, x, LAYOUT, backend="tritton")
    with pytest.raises(ValueError, match="int64"):
        block_sparse_attention(x.long(), x.long(), x.long(), LAYOUT)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale"):
            block_sparse_attention(x, x, x, LAYOUT, scale=scale)


def test_fa4_says_what_it_lacks():
    x = torch.zeros(1, 2, 100, 24)
    with pytest.raises(Refused):
        block_sparse_attention(x, x, x, LAYOUT, backend="fa4")


def test_flex_refuses_gradients_on_the_cpu():
    x = torch.zeros(1, 2, 100, 24, requires_grad=True)
    with pytest.raises(Refused, match="no backward on the CPU"):
        block_sparse_attention(x, x, x, LAYOUT, backend="flex")


def test_dense_refuses_a_mask_past_its_bound():
    x = torch.zeros(1, 1, 2**15, 8)
    with pytest.raises(Refused, match="32768"):
        block_sparse_attention(x, x, x, layouts.local(2**15), backend="dense")


def test_auto_on_a_cpu_visits_live_blocks_only_and_says_why():
    x = torch.zeros(1, 1, 100, 24)
    assert choose(x, layouts.full(100, 16)).backend == "dense"
    chosen = choose(x, LAYOUT)
    assert chosen.backend == "reference" and "cpu" in chosen.reason


def test_auto_follows_the_nearest_measured_case(monkeypatch):
    slow = {"device": "a card", "pattern": "window", "n": 4096, "head_dim": 64, "density": 0.2}
    cases = [
        slow | {"milliseconds": {"flex": 1.0, "triton": 2.0}},
        slow | {"n": 65536, "density": 0.01, "milliseconds": {"flex": 2.0, "triton": 1.0}},
    ]
    monkeypatch.setattr(choice, "_measured", lambda: cases)
    for n, expected in ((4096, "flex"), (65536, "triton")):
        found = choice._decide("a card", torch.bfloat16, 64, layouts.window_global(n))
        assert found.backend == expected and "ms" in found.reason and str(n) in found.reason
    blocks_of_128 = layouts.window_global(4096)
    assert "nothing was measured" in choice._decide("b card", torch.bfloat16, 64, blocks_of_128).reason
    assert choice._decide("a card", torch.float32, 64, blocks_of_128).backend == "flex"
    assert choice._decide("a card", torch.float32, 64, LAYOUT).backend == "reference"


H200 = "NVIDIA H200"


def test_the_table_of_measured_times_is_the_benchmarks_result():
    """Of the first run, and of the later one of the window pattern where that has the case."""
    results = Path(__file__).parents[1] / "benchmarks/results"
    first, later = (
        json.loads((results / f"{name}.json").read_text())["cases"]
        for name in ("attention-h200", "attention-h200-window")
    )
    latest = {(case["pattern"], case["n"], case["head_dim"]): case["milliseconds"] for case in later}
    for case, row in zip(first, choice._measured(), strict=True):
        assert all(case[name] == row[name] for name in ("device", "pattern", "n", "head_dim"))
        assert row["density"] == pytest.approx(case["density"], rel=1e-3)
        times = case["milliseconds"] | latest.get((case["pattern"], case["n"], case["head_dim"]), {})
        sums = {name: ms["forward"] + ms["backward"] for name, ms in times.items()}
        assert row["milliseconds"] == pytest.approx(sums, rel=1e-3)


@pytest.mark.parametrize(("n", "expected"), [(65536, "triton"), (16384, "triton"), (4096, "fa4")])
def test_auto_on_an_h200_takes_flash_attention_4_where_it_was_faster_and_can_serve(monkeypatch, n, expected):
    monkeypatch.setattr(choice.fa4, "is_installed", lambda: True)
    window = layouts.window_global(n)
    found = choice._decide(H200, torch.bfloat16, 128, window)
    assert found.backend == expected and f"window at n={n}" in found.reason
    assert choice._decide(H200, torch.bfloat16, 128, window, without_fa4=True).backend == "triton"
    monkeypatch.setattr(choice.fa4, "is_installed", lambda: False)
    assert choice._decide(H200, torch.bfloat16, 128, window).backend == "triton"


def test_where_the_kernels_lowered_for_hopper_do_not_run_their_times_do_not_count():
    """A cut pattern runs the portable kernels, which FlexAttention beat; blocks of 64 it does not take."""
    cut = layouts.strided(4096).intersection(layouts.causal(4096))
    assert choice._decide(H200, torch.bfloat16, 128, cut).backend == "flex"
    assert choice._decide(H200, torch.bfloat16, 128, layouts.strided(4096)).backend == "triton"
    assert choice._decide(H200, torch.bfloat16, 128, layouts.strided(4096, 64)).backend == "triton"


def test_autocast_casts_as_for_dense_attention():
    q, k, v, _ = draw((1, 2, 100, 24), torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert block_sparse_attention(q, k, v, LAYOUT, backend="reference").dtype == torch.bfloat16


def test_auto_works_under_compile():
    tensors = draw((1, 2, 100, 24), torch.float32)
    q, k, v, grad = tensors
    compiled = torch.compile(lambda q, k, v: block_sparse_attention(q, k, v, LAYOUT), backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = compiled(q, k, v)
    expected = run(tensors, LAYOUT, "auto")
    for value, truth in zip([out, *torch.autograd.grad(out, (q, k, v), grad)], expected, strict=True):
        torch.testing.assert_close(value, truth)
