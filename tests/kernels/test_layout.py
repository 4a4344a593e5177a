import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import Refused
from workbench.kernels import layouts
from workbench.kernels.layout import BlockLayout


def random_layout(seed: int, n: int = 200, block: int = 16, *, causal: bool = False, heads: int | None = None):
    rng = np.random.default_rng(seed)
    nb = -(-n // block)
    size = int(rng.integers(0, nb * nb))
    rows, cols = rng.integers(nb, size=(2, size))
    if heads is None:
        return BlockLayout.from_pairs(n, block, rows, cols, causal=causal)
    return BlockLayout.from_pairs(
        n, block, rows, cols, head_of_pair=rng.integers(heads, size=size), heads=heads, causal=causal
    )


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([None, 3]), st.integers(1, 100))
@settings(max_examples=20, deadline=None)
def test_a_dense_mask_survives_the_round_trip(seed, causal, heads, n):
    layout = random_layout(seed, n, causal=causal, heads=heads)
    mask = layout.to_dense_mask()
    again = BlockLayout.from_dense_mask(mask, 16)
    assert torch.equal(again.to_dense_mask(), mask)
    assert again.nnz == layout.nnz


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=20, deadline=None)
def test_the_transpose_lists_the_same_blocks_and_puts_partial_ones_last(seed, causal, heads):
    layout = random_layout(seed, 200, causal=causal, heads=heads)
    nb, copies = layout.num_blocks, heads or 1
    for csr in (layout.rows, layout.columns):
        for row in range(copies * nb):
            partial = csr.partial[csr.pointers[row] : csr.pointers[row + 1]]
            assert not np.any(partial[:-1] & ~partial[1:])
    pairs = {(r // nb, r % nb, int(c)) for r, c in zip(owners(layout.rows), layout.rows.indices, strict=True)}
    turned = {(c // nb, int(r), c % nb) for c, r in zip(owners(layout.columns), layout.columns.indices, strict=True)}
    assert pairs == turned


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_pairs_in_any_order_and_more_than_once_are_the_same_layout(pairs):
    rows, cols = ([p[k] for p in pairs] for k in (0, 1))
    layout = BlockLayout.from_pairs(80, 16, rows, cols)
    assert list(zip(owners(layout.rows), layout.rows.indices, strict=True)) == sorted(set(pairs))


def owners(csr):
    return np.repeat(np.arange(csr.counts.size), csr.counts)


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from([None, 2]))
@settings(max_examples=15, deadline=None)
def test_union_and_intersection_are_those_of_the_masks(a, b, heads):
    first, second = random_layout(a, heads=heads), random_layout(b)
    assert torch.equal(first.union(second).to_dense_mask(), first.to_dense_mask() | second.to_dense_mask())
    assert torch.equal(first.intersection(second).to_dense_mask(), first.to_dense_mask() & second.to_dense_mask())


def test_intersection_with_causal_makes_a_layout_causal():
    layout = layouts.local(100, 16, radius=1).intersection(layouts.causal(100, 16))
    assert layout.causal
    assert torch.equal(layout.to_dense_mask(), layouts.local(100, 16, radius=1).to_dense_mask().tril())


def test_density_flops_and_bytes_follow_the_formulas():
    layout = layouts.window_global(4096, 128)
    nb = 32
    assert layout.csr_bytes == 4 * (nb + 1) + 4 * layout.nnz
    assert layout.dense_mask_bytes == 4096**2
    assert layout.flops(2, 3, 64) == pytest.approx(4 * 2 * 3 * 4096**2 * 64 * layout.density)
    assert layout.flops(2, 3, 64, backward=True) == pytest.approx(2.5 * layout.flops(2, 3, 64))
    compression = layout.compression()
    assert compression["scores computed"] == pytest.approx(1 - layout.density)
    assert compression["stored mask bytes"] > 0.999


def test_index_memory_at_a_million_tokens_is_kilobytes():
    assert layouts.local(2**20, 128, radius=1).csr_bytes < 140_000


def test_a_mask_that_cuts_blocks_is_refused_or_covered():
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[3, 40] = True
    with pytest.raises(Refused, match="cover=True"):
        BlockLayout.from_dense_mask(mask, 16)
    assert BlockLayout.from_dense_mask(mask, 16, cover=True).nnz == 1


def test_heads_can_be_stacked_and_selected():
    parts = [layouts.local(100, 16, radius=r) for r in (0, 1, 2)]
    stacked = BlockLayout.per_head(parts)
    assert stacked.heads == 3
    assert torch.equal(stacked.select_heads(1, 3).to_dense_mask(), torch.stack([p.to_dense_mask() for p in parts[1:]]))


@pytest.mark.parametrize(
    "build",
    [
        lambda: layouts.local(0),
        lambda: layouts.local(100, 48),
        lambda: layouts.local(100, radius=-1),
        lambda: BlockLayout.from_pairs(100, 16, [0, 7], [0, 1]),
        lambda: BlockLayout.from_pairs(100, 16, [0, 1], [0]),
        lambda: BlockLayout.from_pairs(100, 16, [0], [0], heads=2),
        lambda: BlockLayout.from_dense_mask(torch.ones(3, 4)),
        lambda: BlockLayout.per_head([]),
        lambda: BlockLayout.per_head([layouts.local(100), layouts.causal(100)]),
        lambda: layouts.local(100).union(layouts.local(200)),
        lambda: layouts.local(100).union(layouts.causal(100)),
        lambda: BlockLayout.per_head([layouts.local(100)] * 2).select_heads(1, 3),
        lambda: layouts.grid_2d(100, 16, height=8, width=8),
    ],
)
def test_what_has_no_layout_is_refused(build):
    with pytest.raises(Refused):
        build()


def test_a_layout_draws_itself_at_most_512_pixels_wide():
    figure = BlockLayout.per_head([layouts.local(2**17, 128), layouts.strided(2**17, 128)]).draw(
        head=1, title="strided"
    )
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (512, 512)
    assert 0 < image.mean() < 1
