"""The gate before every timing: output and gradients against float64, beside dense attention's own error.

A forward pass may be exact while the backward is wrong by orders of magnitude, so all four are held to the bound: twice
the error that dense attention over the same mask makes in the same dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.layout import BlockLayout

NAMES = ("output", "grad q", "grad k", "grad v")
MARGIN = 2.0
"""Of dense attention's own error."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class GateFailed(RuntimeError):
    """An attention function is wrong: nothing of it is to be timed."""


@dataclass(frozen=True)
class Gate:
    """Relative errors (norm of the difference over norm of the truth) of :data:`NAMES`, and those of dense attention.

    Attributes:
        floor: allowed besides. Where every query sees one key the gradients of q and k are zero but for rounding, in both.
    """

    errors: dict[str, float]
    dense: dict[str, float]
    floor: dict[str, float]

    @property
    def failures(self) -> dict[str, float]:
        """The errors past the bound; a value that is not finite has an infinite one."""
        return {k: e for k, e in self.errors.items() if not e <= MARGIN * self.dense[k] + self.floor[k]}

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        shown = self.failures or self.errors
        return ", ".join(f"{k} is off by {e:.2g}, dense attention by {self.dense[k]:.2g}" for k, e in shown.items())


def check(attend: Attend, layout: BlockLayout, tensors: Sequence[Tensor]) -> Gate:
    """Hold ``attend(q, k, v)`` to the bound on q, k, v and an output gradient, each ``(batch, heads, n, head_dim)``.

    The truth is the reference backend in float64 over the live blocks of ``layout``. Dense attention takes the layout as a
    token mask, so ``n`` is bounded by ``dense.LARGEST_MASKED``.
    """
    exact = passes(_backend("reference", layout), [x.double() for x in tensors])
    rival = relative_errors(passes(_backend("dense", layout), tensors), exact)
    ours = relative_errors(passes(attend, tensors), exact)
    rounding = torch.finfo(tensors[0].dtype).eps / 100 * float(tensors[3].double().norm())
    return Gate(ours, rival, {name: rounding / size_of(x) for name, x in zip(NAMES, exact, strict=True)})


def passes(attend: Attend, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and the gradients of q, k and v, for q, k, v and an output gradient."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))]


def relative_errors(values: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """By name; infinite where a value is not finite."""
    found = {}
    for name, value, truth in zip(NAMES, values, exact, strict=True):
        error = float((value.double() - truth).norm()) / size_of(truth)
        found[name] = error if torch.isfinite(value).all() else float("inf")
    return found


def size_of(truth: Tensor) -> float:
    """Its norm, or a number so small that what should be zero and is not shows, and yet no ratio overflows."""
    return max(float(truth.norm()), 1e-30)


def _backend(name: str, layout: BlockLayout) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = block_sparse_attention(q, k, v, layout, backend=name)
        assert isinstance(out, Tensor)
        return out

    return attend
