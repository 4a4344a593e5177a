"""Attention whose forward pass is exact and whose backward pass is not, imported by an arm's process in the tests."""

import torch
from torch import Tensor

from workbench.experiment.attention_task import AttentionTask, Case


class HalfTheGradient(torch.autograd.Function):
    """Exact forward, wrong backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grad / 2


class WrongBackward(AttentionTask):
    """The planted fault: dK is half of what it should be."""

    def _case(self, n: int, heads: int, head_dim: int) -> Case:
        case = super()._case(n, heads, head_dim)
        right = case.attend
        case.attend = lambda q, k, v: right(q, HalfTheGradient.apply(k), v)
        return case
