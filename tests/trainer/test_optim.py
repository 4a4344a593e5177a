"""Optimizer groups and the learning-rate schedule."""

import pytest
from torch import nn

from tests.trainer.runs import config
from workbench.errors import Refused
from workbench.models.build import build_model
from workbench.trainer.optim import learning_rate, make_optimizer


def test_only_matrices_decay() -> None:
    model = build_model("vit-nano", num_classes=10, image_size=8, in_channels=1, patch_size=4)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = (
        {names[id(p)] for p in group["params"]}
        for group in make_optimizer(model, config(weight_decay=0.1)).param_groups
    )
    assert {"blocks.0.attn.qkv.weight", "patch_embed.weight", "pos_embed"} <= decayed
    assert {"blocks.0.attn.qkv.bias", "blocks.0.norm1.weight", "cls_token"} <= kept
    assert decayed | kept == set(names.values())


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(Refused, match="parameters to train"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), config())


def test_warm_up_is_linear_and_reaches_the_full_rate() -> None:
    rates = [learning_rate(config(learning_rate=0.4, warmup_steps=4), k) for k in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_the_cosine_halves_midway_and_ends_at_zero_for_good() -> None:
    setting = config(learning_rate=1.0, warmup_steps=10, steps=110)
    assert learning_rate(setting, 60) == pytest.approx(0.5)
    assert learning_rate(setting, 110) == learning_rate(setting, 500) == pytest.approx(0.0)
    falling = [learning_rate(setting, k) for k in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_a_constant_schedule_stays_and_a_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert learning_rate(config(learning_rate=0.1, schedule="constant"), 10_000) == 0.1
    assert learning_rate(config(learning_rate=1.0, warmup_steps=100, steps=10), 9) == pytest.approx(0.1)
