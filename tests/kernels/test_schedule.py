import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_layout import owners, random_layout
from workbench.kernels import layouts
from workbench.kernels.schedule import group_size, item_bound, schedule

CPU = torch.device("cpu")


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([None, 2]), st.booleans(), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_items_cover_every_live_block_once_within_the_bound(seed, causal, heads, by_columns, bound):
    layout = random_layout(seed, 200, causal=causal, heads=heads)
    csr, nb = (layout.columns if by_columns else layout.rows), layout.num_blocks
    plan = schedule(layout, by_columns, bound, CPU)
    head, row, first, full, partial, slot = plan.items.numpy().T
    length = full + partial
    assert length.max(initial=0) <= bound
    assert np.all(np.diff(length) <= 0), "longest first"
    taken = np.concatenate([np.arange(f, f + k) for f, k in zip(first, length, strict=True)])
    assert sorted(taken) == list(range(layout.nnz))
    for f, whole, cut, h, r in zip(first, full, partial, head, row, strict=True):
        assert not csr.partial[f : f + whole].any() and csr.partial[f + whole : f + whole + cut].all()
        assert np.all(owners(csr)[f : f + whole + cut] == h * nb + r)
    assert set(zip(head, row, strict=True)) == {(h, r) for h in range(heads or 1) for r in range(nb)}
    for h in range(heads or 1):
        used = slot[(head == h) & (slot >= 0)]
        assert sorted(used) == list(range(used.size)) and used.size <= plan.num_slots


def test_slots_of_a_split_row_are_neighbours_in_the_order_of_its_items():
    plan = schedule(layouts.window_global(4096), False, 8, CPU)
    head, row, first_slot, count = plan.splits[0].tolist()
    items = plan.items[(plan.items[:, 1] == row) & (plan.items[:, 0] == head)]
    by_position = items[items[:, 2].argsort()]
    assert by_position[:, 5].tolist() == list(range(first_slot, first_slot + count))


def test_one_dense_row_is_dealt_out_like_the_rest():
    layout = layouts.window_global(65536)
    bound = item_bound(layout, outer=8, num_processors=132)
    longest = schedule(layout, False, bound, CPU).items[0, 3:5].sum()
    assert longest <= layout.nnz * 8 / 132 / 2, "no item is more than half a processor's share"


def test_uniform_rows_are_not_split():
    layout = layouts.full(16384)
    assert schedule(layout, False, item_bound(layout, 32, 132), CPU).num_slots == 0


@pytest.mark.parametrize(("batch", "heads", "n", "d"), [(8, 16, 4096, 128), (1, 8, 65536, 128), (1, 1, 128, 64)])
def test_a_group_of_heads_fits_the_cache_or_is_one(batch, heads, n, d):
    k = torch.empty(batch, heads, n, d, dtype=torch.bfloat16, device="meta")
    group = group_size(layouts.local(n), k, batch * heads)
    assert group == 1 or group * 2 * n * d * 2 <= 24 * 2**20
    assert 1 <= group <= batch * heads
