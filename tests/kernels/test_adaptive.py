import pytest
import torch

from workbench.errors import Refused
from workbench.kernels import layouts
from workbench.kernels.adaptive import AdaptiveLayout, select_blocks


def planted(n: int = 256, block: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k in which query block i points at key block (3·i) mod nb, for head 0, and (i + 1) mod nb for head 1."""
    nb = n // block
    directions = torch.eye(nb) * 12
    partner = torch.stack([torch.arange(nb) * 3 % nb, (torch.arange(nb) + 1) % nb])
    k = directions.repeat_interleave(block, 0).expand(1, 2, n, nb)
    q = torch.stack([directions[p].repeat_interleave(block, 0) for p in partner])[None]
    return q, k, partner


@pytest.mark.parametrize("rule", [{"mass": 0.9}, {"top_k": 1}])
def test_the_blocks_that_attention_points_at_are_found(rule):
    q, k, partner = planted()
    layout = select_blocks(q, k, 16, **rule)
    blocks = layout.to_dense_mask()[:, ::16, ::16]
    nb = 16
    expected = torch.eye(nb, dtype=torch.bool).repeat(2, 1, 1)
    expected[torch.arange(2)[:, None], torch.arange(nb), partner] = True
    assert torch.equal(blocks, expected)


def test_more_mass_keeps_more_blocks_and_all_of_it_keeps_every_block():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 250, 32) * 3, torch.randn(2, 2, 250, 32) * 3
    densities = [select_blocks(q, k, 16, mass=m).density for m in (0.3, 0.6, 0.9, 1.0)]
    assert densities == sorted(densities) and densities[0] < densities[-1] == 1


def test_causal_selection_stays_below_the_diagonal_and_keeps_what_must_stay():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 256, 32), torch.randn(1, 2, 256, 32)
    keep = layouts.window_global(256, 16, radius=1).intersection(layouts.causal(256, 16))
    layout = select_blocks(q, k, 16, top_k=2, causal=True, keep=keep)
    mask = layout.to_dense_mask()
    assert layout.causal and not mask.triu(1).any()
    assert (mask | ~keep.to_dense_mask()).all()


def test_a_layout_is_refreshed_every_so_many_calls():
    torch.manual_seed(0)
    adaptive = AdaptiveLayout(16, top_k=2, refresh_every=3)
    seen = [adaptive(torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16)) for _ in range(7)]
    assert seen[0] is seen[2] and seen[3] is seen[5]
    assert len({layout.handle for layout in seen}) == 3
    assert adaptive(torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)).n == 64


@pytest.mark.parametrize("rule", [{}, {"mass": 0.5, "top_k": 2}, {"mass": 0.0}, {"mass": 1.5}, {"top_k": 0}])
def test_rules_that_say_nothing_or_too_much_are_refused(rule):
    x = torch.zeros(1, 1, 64, 16)
    with pytest.raises(Refused):
        select_blocks(x, x, 16, **rule)
