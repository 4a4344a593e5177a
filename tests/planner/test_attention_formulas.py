import math

import pytest

from workbench.kernels import layouts
from workbench.models.config import vit_config
from workbench.planner.attention import claimed_mebibytes, csr_bytes, density, score_bytes, work_exponent
from workbench.planner.flops import operators

EXACT = [
    ("local", {"radius": 0}), ("local", {"radius": 3}), ("window_global", {}), ("window_global", {"global_blocks": 3}),
    ("strided", {}), ("strided", {"stride": 3, "radius": 4}), ("fixed", {}), ("fixed", {"stride": 5}), ("causal", {}),
    ("full", {}),
]  # fmt: skip


@pytest.mark.parametrize("n", [16, 100, 1000, 4096])
@pytest.mark.parametrize(("pattern", "options"), EXACT)
def test_the_formula_counts_the_blocks_of_the_layout(pattern, options, n):
    layout = getattr(layouts, pattern)(n, 16, **options)
    live = density(pattern, n, 16, **options)
    assert live == pytest.approx(layout.density)
    assert csr_bytes(n, 16, live) == pytest.approx(layout.csr_bytes)


def test_random_patterns_are_met_on_average_and_two_dimensional_ones_bounded():
    assert density("random", 16384, 16) == pytest.approx(layouts.random(16384, 16).density, rel=0.01)
    for radius in (2, 8):
        layout = layouts.grid_2d(4096, 16, height=64, width=64, radius=radius)
        bound = density("grid_2d", 4096, 16, radius=radius, height=64, width=64)
        assert layout.density <= bound < 1.3 * layout.density
    assert density("adaptive", 4096, 16, top_k=3) == 4 / 256 and density("adaptive", 4096, 16, mass=0.9) == 1


def test_root_n_patterns_grow_as_n_to_the_three_halves():
    lengths = [2**k for k in range(14, 21, 2)]
    for pattern, exponent in (("sdpa", 2.0), ("fixed", 1.5), ("strided", 1.5), ("local", 1.0)):
        found = work_exponent(lengths, [density(pattern, n) for n in lengths])
        assert found == pytest.approx(exponent, abs=0.05)


def test_the_claimed_figure_is_a_batchs_scores_and_not_a_models():
    assert claimed_mebibytes(2048, 16, 50) == 12_800 == score_bytes(50, 16, 2048, 4) / 2**20
    assert claimed_mebibytes(2048, 16, 1e10) > 1e12


def test_a_vits_flops_count_the_live_blocks_alone():
    shape = {"image_size": 128, "patch_size": 2}
    dense, sparse = vit_config("vit-nano", **shape), vit_config("vit-nano", **shape, attention="local")
    flops = [next(o.flops for o in operators(vit, 1) if o.kernel == "attention") for vit in (dense, sparse)]
    assert flops[1] / flops[0] == pytest.approx(layouts.local(dense.num_tokens).density)
    assert not math.isclose(flops[0], flops[1])
