import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from workbench.errors import Refused
from workbench.kernels import layouts
from workbench.kernels.adapters import layout_attention, pattern_attention, register_transformers, register_vit
from workbench.kernels.attention import block_sparse_attention


def test_a_pattern_builds_its_layout_for_each_length_that_comes():
    attend = pattern_attention("window_global", 16, radius=1)
    for n in (64, 100, 64):
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        expected = block_sparse_attention(q, k, v, layouts.window_global(n, 16, radius=1), backend="reference")
        torch.testing.assert_close(attend(q, k, v), expected)


def test_an_unknown_pattern_is_refused_with_the_nearest_names():
    with pytest.raises(Refused, match="window_global"):
        pattern_attention("window_globl")


def test_our_vit_takes_a_registered_pattern_by_name(monkeypatch):
    from workbench.models import attention

    monkeypatch.setattr(attention, "ATTENTION", dict(attention.ATTENTION))
    register_vit("everything", pattern_attention("full", 16))
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    torch.testing.assert_close(attention.attention_function("everything")(q, k, v), attention.sdpa(q, k, v))


@pytest.fixture
def transformers(monkeypatch):
    """The two registries of transformers, which CI does not install: the adapter needs nothing else of it."""
    fake = ModuleType("transformers")
    fake.attention, fake.masks = {}, {}
    fake.AttentionInterface = SimpleNamespace(register=fake.attention.__setitem__)
    fake.AttentionMaskInterface = SimpleNamespace(register=fake.masks.__setitem__)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    return fake


def test_transformers_gets_an_attention_and_a_mask_function(transformers):
    layout = layouts.local(100, 16, radius=1)
    register_transformers("window", layout)
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    out, weights = transformers.attention["window"](torch.nn.Identity(), q, k, v, None, scaling=0.5)
    expected = block_sparse_attention(q, k, v, layout, scale=0.5)
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert transformers.masks["window"](1, 100, 100, attention_mask=torch.ones(1, 100)) is None


def test_transformers_masks_dropout_and_causality_are_never_dropped_in_silence(transformers):
    register_transformers("window", layouts.local(100, 16, radius=1))
    attend, mask = transformers.attention["window"], transformers.masks["window"]
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    padding = torch.ones(1, 100)
    padding[0, -1] = 0
    for call in (
        lambda: mask(1, 100, 100, attention_mask=padding),
        lambda: attend(torch.nn.Identity(), q, k, v, padding.bool()),
        lambda: attend(torch.nn.Identity(), q, k, v, None, dropout=0.1),
        lambda: attend(torch.nn.Identity(), q, k, v, None, is_causal=True),
    ):
        with pytest.raises(Refused):
            call()


def test_a_fixed_layout_refuses_another_length():
    x = torch.zeros(1, 2, 64, 8)
    with pytest.raises(Refused, match="64 tokens"):
        layout_attention(layouts.local(100, 16))(x, x, x)
