import numpy as np
import pytest
import torch

from workbench.kernels import layouts


@pytest.mark.parametrize(
    ("builder", "n", "density"),
    [
        (layouts.strided, 4096, 0.33),
        (layouts.strided, 16384, 0.163),
        (layouts.strided, 65536, 0.085),
        (layouts.window_global, 4096, 0.21),
        (layouts.window_global, 16384, 0.054),
        (layouts.window_global, 65536, 0.014),
    ],
)
def test_the_published_patterns_have_their_published_densities(builder, n, density):
    assert builder(n).density == pytest.approx(density, rel=0.03)


def test_the_cost_of_root_n_patterns_grows_as_n_to_the_three_halves():
    lengths = np.array([2**k for k in range(14, 21, 2)])
    for builder in (layouts.strided, layouts.fixed):
        scores = [builder(int(n)).density * float(n) ** 2 for n in lengths]
        slope = np.polyfit(np.log(lengths), np.log(scores), 1)[0]
        assert slope == pytest.approx(1.5, abs=0.05)


def test_local_and_causal_match_their_definitions():
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    blocks = layouts.local(7 * 16, 16, radius=2).to_dense_mask()[::16, ::16]
    assert torch.equal(blocks, distance <= 2)
    assert torch.equal(layouts.causal(100, 16).to_dense_mask(), torch.ones(100, 100, dtype=torch.bool).tril())
    assert layouts.full(100, 16).is_full and layouts.causal(100, 16).is_full
    assert not layouts.local(100, 16, radius=1).is_full


def test_fixed_sees_its_group_and_every_groups_last_column():
    blocks = layouts.fixed(10 * 16, 16, stride=4).to_dense_mask()[::16, ::16]
    i, j = torch.arange(10)[:, None], torch.arange(10)
    assert torch.equal(blocks, (i // 4 == j // 4) | (j % 4 == 3))


def test_random_repeats_with_its_seed_and_keeps_the_diagonal():
    one, two, other = (layouts.random(4096, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.rows.indices, two.rows.indices)
    assert not np.array_equal(one.rows.indices, other.rows.indices)
    assert one.to_dense_mask().diagonal().all()


@pytest.mark.parametrize(("height", "width", "special"), [(16, 16, 0), (12, 20, 5), (9, 31, 1)])
@pytest.mark.parametrize(("radius", "dilation"), [(2, 1), (1, 4), (2, 3)])
def test_a_2d_layout_covers_every_pair_of_neighbours(height, width, special, radius, dilation):
    n, block = height * width + special, 16
    layout = layouts.dilated_2d(
        n, block, height=height, width=width, radius=radius, dilation=dilation, special_tokens=special
    )
    order = layouts.tile_order(height, width, block, special_tokens=special)
    assert sorted(order) == list(range(n))
    y, x = np.divmod(order[: height * width] - special, width)
    near = np.ones((n, n), dtype=bool)
    dy, dx = (np.abs(a[:, None] - a[None, :]) for a in (y, x))
    span = radius * dilation
    near[: height * width, : height * width] = (dy <= span) & (dx <= span) & (dy % dilation == 0) & (dx % dilation == 0)
    mask = layout.to_dense_mask().numpy()
    assert not np.any(near & ~mask)
    if height % 4 == 0 and width % 4 == 0 and not special:  # whole tiles: no block is live without a reason
        blocks = near.reshape(n // block, block, n // block, block).any(axis=(1, 3))
        assert np.array_equal(mask[::block, ::block], blocks)


def test_a_2d_window_in_tiles_is_sparser_than_in_rows():
    tiles = layouts.grid_2d(256 * 256, 128, height=256, width=256, radius=4)
    strips = layouts.grid_2d(256 * 256, 128, height=256, width=256, radius=4, tile=(1, 128))
    assert tiles.density < strips.density / 1.5
