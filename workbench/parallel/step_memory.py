"""A training step to be watched: what it allocates, on whatever device and however its model is wrapped."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.parallel.gradients import clip_gradients, local
from workbench.parallel.ledger import Ledger, Peak

STEPS = 2
"""The second step is like all later ones: the optimizer has its state, and FSDP its order."""
WORKSPACE = 2 * 32 * 2**20
"""cuBLAS on Hopper keeps 32 MiB per stream and host thread (``getChosenWorkspaceSize``): the forward's thread and autograd's."""


class TrainingStep:
    """The training step of a wrapped model: forward, backward, clipping, AdamW.

    Args:
        shards: update the parts of this rank as plain tensors. They are the same bytes; but to work out, for every list of a
            thousand DTensors, how its result is sharded takes longer than all the rest of a dry run.
    """

    def __init__(self, model: nn.Module, *, autocast: torch.dtype | None, shards: bool = False) -> None:
        self.model, self.autocast = model, autocast
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.updated = [nn.Parameter(local(p.detach())) for p in self.parameters] if shards else self.parameters
        # What PyTorch takes by itself on a GPU, said here because the fake device is a CPU to it.
        self.optimizer = torch.optim.AdamW(self.updated, lr=1e-4, foreach=True)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        with torch.autocast(images_BCHW.device.type, self.autocast) if self.autocast else nullcontext():
            return F.cross_entropy(self.model(images_BCHW), labels_B)

    def update(self) -> None:
        if self.updated is not self.parameters:
            for part, parameter in zip(self.updated, self.parameters, strict=True):
                part.grad, parameter.grad = None if parameter.grad is None else local(parameter.grad), None
        clip_gradients(self.updated, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def follow(step: TrainingStep, ledger: Ledger, inputs: tuple[Tensor, Tensor], *, on_host: bool) -> Peak:
    """Take ``STEPS`` steps under the ledger; the peak over them.

    Args:
        on_host: parameters, gradients and optimizer state lie in host memory.
    """
    ledger.assign([*step.model.parameters(), *step.model.buffers()], "host" if on_host else "parameters")
    for _ in range(STEPS):
        with ledger.during(phase="forward"):
            loss = step.forward(*inputs)
        with ledger.during(phase="backward"):
            loss.backward()
        del loss
        ledger.assign((p.grad for p in step.parameters), "host" if on_host else "gradients")
        with ledger.during(phase="update", kind="host" if on_host else "optimizer"):
            step.update()
    state = [value for entry in step.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    # Adam's step counters are tensors in host memory.
    ledger.assign((t for t in state if t.dim() == 0), "host")
    return ledger.peak(WORKSPACE, since="forward")
