"""Small runs that the trainer's tests share."""

from typing import Any

import torch
from torch import nn

from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import Trainer


def config(**fields: Any) -> TrainConfig:
    args = {"model_args": {"patch_size": 4}, "global_batch": 16, "steps": 60, "warmup_steps": 3}
    return TrainConfig(**{"device": "cpu", **args, **fields})


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def with_dropout(num_classes: int, image_size: int, in_channels: int) -> nn.Module:
    """A model of the user's own, by factory."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(in_channels * image_size**2, num_classes))
