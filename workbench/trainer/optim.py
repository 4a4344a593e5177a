"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import Tensor, nn

from workbench.errors import Refused
from workbench.trainer.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum 0.9; weight decay on matrices only, not on biases, norms and embeddings of one row.

    Raises:
        Refused: a model without a parameter to train.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise Refused("model", config.model, allowed="one with parameters to train")
    groups = [
        {"params": [p for p in trained if _is_matrix(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if not _is_matrix(p)], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    # foreach is what PyTorch takes by itself on a GPU; said here so that CPU and GPU run the same algorithm.
    fused = config.fused_optimizer
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=0.9, fused=fused, foreach=not fused)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused, foreach=not fused)


def _is_matrix(parameter: Tensor) -> bool:
    """More than one axis of more than one entry: a class token of shape (1, 1, width) is a vector."""
    return sum(size > 1 for size in parameter.shape) >= 2


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of update number ``step``, counted from 0: linear warm-up, then constant or a cosine to 0 at ``config.steps``."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(config.steps - config.warmup_steps, 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min((step - config.warmup_steps) / span, 1.0)))
