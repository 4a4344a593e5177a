"""An audit of someone's own training loop: does each step do what mixed precision, clipping and DDP ask of it?

Attach it, run a few steps, read ``symptoms``. It watches calls and values from outside and changes nothing; it reads the
device several times a step, so a few steps are what it is for.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from workbench.diagnose.symptom import Symptom

CLIP_BEFORE_UNSCALE = "gradients changed before unscale_"
NONFINITE_CLIP = "clipped by a non-finite norm"
REVERSED = "gradients reversed"
NONFINITE_UPDATE = "update from non-finite gradients"
BATCHNORM = "BatchNorm statistics are not finite"
DOUBLE_STEP = "optimizer stepped twice"
STALE_CACHE = "stale autocast cache"
SCHEDULE = "schedule advanced on a skipped step"
NO_SYNC = "no_sync around the backward only"

PROBE = 64
"""Elements of each gradient that are kept to see its sign change."""


@dataclass
class _Backward:
    """What the gradients were when a backward ended."""

    versions: dict[str, int]
    first_bad: str
    probes: dict[str, Tensor]


@dataclass
class _Window:
    """One step: an attempt is a call that should update the weights, an update one that does."""

    backward: _Backward | None = None
    unscaled: bool = False
    attempts: int = 0
    updates: int = 0
    reported: set[str] = field(default_factory=set)


class StepAudit:
    """Watches a loop made of ``model``, ``optimizer`` and, where there are such, a ``GradScaler`` and a scheduler.

    ::

        audit = StepAudit(model, optimizer, scaler=scaler, scheduler=scheduler)
        with audit.attached():
            for images, labels in batches:
                ...your own step...
        for symptom in audit.symptoms: print(symptom)

    Pass the module that the loop calls (the DDP one, not what it wraps). A step, as counted in symptoms, goes to the first
    backward after an update or ``scaler.update()``. Parameters sharded by FSDP2 are not seen: their gradients arrive elsewhere.

    Finds: gradients changed (clipped) before ``unscale_``; clipping by a non-finite norm, by a negative one, and updates
    from non-finite gradients; BatchNorm statistics spoilt for good; two ``optimizer.step()`` for one backward; weights
    changed inside an autocast block whose cache still holds the old ones; a schedule that advances on skipped steps;
    ``no_sync`` around the backward only. Each is reported once per step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler, self.scheduler = model, optimizer, scaler, scheduler
        self.symptoms: list[Symptom] = []
        self.step = 0
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._window = _Window()
        self._ended = False
        self._backward_runs = False
        self._inside_scaler = False
        self._synced_forward = False
        self._spoilt: set[str] = set()

    @contextmanager
    def attached(self) -> Iterator["StepAudit"]:
        """Watch while the context lasts; everything is taken off again, also when an exception leaves it."""
        with ExitStack() as stack:
            for _, p in self._named:
                handle = p.register_post_accumulate_grad_hook(self._gradient_arrived)
                stack.callback(handle.remove)
            stack.callback(self.model.register_forward_pre_hook(self._forward_begins).remove)
            stack.callback(self.optimizer.register_step_pre_hook(self._update_begins).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._attempt_ends).remove)
            if self.scaler is not None and self.scaler.is_enabled():
                stack.enter_context(_around(self.scaler, "unscale_", self._unscale_begins, self._unscale_ends))
                stack.enter_context(_around(self.scaler, "step", self._scaler_step_begins, self._scaler_step_ends))
                stack.enter_context(_around(self.scaler, "update", _nothing, self._attempt_ends))
            if self.scheduler is not None:
                stack.enter_context(_around(self.scheduler, "step", self._schedule_advances, _nothing))
            yield self
            self._check_batchnorm()

    def _say(self, fault: str, detail: str, where: str = "", fix: str = "") -> None:
        if fault in self._window.reported:
            return
        self._window.reported.add(fault)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.symptoms.append(Symptom(fault, detail, self.step, where, rank, fix))

    # Forward.

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        self._backward_runs = False  # an exception may have ended one before its end
        if isinstance(module, DistributedDataParallel):
            self._synced_forward = bool(module.require_backward_grad_sync)
        self._check_cache()
        self._check_batchnorm()

    def _check_cache(self) -> None:
        """Read a weight back through autocast's cache: a row of the identity times it is one of its columns."""
        linear = next(((n, m) for n, m in self.model.named_modules() if type(m) is nn.Linear), None)
        if linear is None:
            return
        name, module = linear
        kind, weight = module.weight.device.type, module.weight
        cached = torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()
        if not cached or not self._ended or not weight.isfinite().all():
            return
        identity = torch.eye(min(PROBE, weight.shape[1]), weight.shape[1], device=weight.device)
        # With gradients on: this very cast may be the one that is kept for the forward, which needs its history.
        with torch.enable_grad():
            seen = F.linear(identity, weight)
        true = weight.detach().t()[: len(identity)].to(seen.dtype)
        if not torch.equal(seen.detach(), true):
            self._say(
                STALE_CACHE,
                "the forward uses weights from before the last update: they changed inside an autocast block",
                name,
                "enter autocast anew for each forward, and update outside it",
            )

    def _check_batchnorm(self) -> None:
        for name, module in self.model.named_modules():
            if not isinstance(module, _NormBase) or name in self._spoilt:
                continue
            statistics = [x for x in (module.running_mean, module.running_var) if x is not None]
            if not all(x.isfinite().all() for x in statistics):
                self._spoilt.add(name)
                self._say(
                    BATCHNORM,
                    "a batch with infinities went into the running statistics, which no skipped update undoes",
                    name,
                    "restore the statistics from a checkpoint; keep the layer's input finite (fp32)",
                )

    # Backward.

    def _gradient_arrived(self, parameter: Tensor) -> None:
        if self._backward_runs:
            return
        self._backward_runs = True
        if self._ended:
            self._next_step()
        # DDP queues its own end of backward after this; a callback queued by a callback comes after that one.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._backward_ends))

    def _next_step(self) -> None:
        self.step += 1
        self._window, self._ended = _Window(), False

    def _backward_ends(self) -> None:
        self._backward_runs = False
        there = [(name, p.grad) for name, p in self._named if p.grad is not None]
        bad = [name for name, grad in there if not grad.isfinite().all()]
        probes = {name: grad.flatten()[:PROBE].clone() for name, grad in there}
        # A backward goes from the last layer to the first, so the last name is the nearest to where it began.
        self._window.backward = _Backward(self._versions(), bad[-1] if bad else "", probes)
        self._window.updates = self._window.attempts = 0
        self._window.unscaled = False
        ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        if ddp and self._synced_forward and not ddp.require_backward_grad_sync:
            self._say(
                NO_SYNC,
                "the forward was outside, and it decides: gradients are all-reduced all the same",
                fix="put the forward inside no_sync as well",
            )

    def _versions(self) -> dict[str, int]:
        """How often each gradient was written to in place."""
        return {name: p.grad._version for name, p in self._named if p.grad is not None}

    # Between backward and update.

    def _changed(self) -> bool:
        backward = self._window.backward
        return backward is not None and self._versions() != backward.versions

    def _unscale_begins(self, *args: Any) -> None:
        if self._changed() and not self._window.unscaled:
            assert self.scaler is not None
            self._say(
                CLIP_BEFORE_UNSCALE,
                f"they still carry the loss scale, so a clipping threshold is off by {self.scaler.get_scale():g}",
                fix="call scaler.unscale_(optimizer) before clipping",
            )
        self._window.unscaled = True

    def _unscale_ends(self, *args: Any) -> None:
        if self._window.backward:
            self._window.backward.versions = self._versions()

    def _scaler_step_begins(self, *args: Any) -> None:
        if not self._window.unscaled:
            self._unscale_begins()  # a fused optimizer unscales by itself
        self._inside_scaler = True
        self._attempt()

    def _scaler_step_ends(self, *args: Any) -> None:
        self._inside_scaler = False

    def _attempt(self) -> None:
        self._window.attempts += 1
        if self._window.attempts > 1:
            self._say(
                DOUBLE_STEP,
                f"{self._window.attempts} steps for one backward; beside a scaler, a bare one is not skipped on overflow",
                fix="step once: scaler.step(optimizer) under a scaler, else optimizer.step()",
            )

    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._window.updates += 1
        if not self._inside_scaler:
            self._attempt()
        backward = self._window.backward
        if backward is None:
            return
        if backward.first_bad:
            fault = NONFINITE_CLIP if self._changed() else NONFINITE_UPDATE
            detail = "scaled by 1/norm, one non-finite gradient makes all others 0 or NaN"
            fix = "skip the step when the norm is not finite (error_if_nonfinite=True shows it)"
            self._say(fault, detail if fault == NONFINITE_CLIP else "the weights are lost", backward.first_bad, fix)
        elif self._is_reversed(backward):
            self._say(REVERSED, "they changed sign between backward and update: is max_norm negative?")

    def _is_reversed(self, backward: _Backward) -> bool:
        """Whether the sampled elements point the other way; unscaling and clipping only shorten them."""
        products = [
            (p.grad.flatten()[:PROBE].double() * backward.probes[name].double()).sum()
            for name, p in self._named
            if p.grad is not None and name in backward.probes
        ]
        return bool(products) and bool(torch.stack(products).sum() < 0)

    # After the update.

    def _attempt_ends(self, *args: Any) -> None:
        self._ended = True

    def _schedule_advances(self, *args: Any) -> None:
        if self._window.attempts and not self._window.updates:
            self._say(
                SCHEDULE,
                "scheduler.step() ran though the scaler skipped the update",
                fix="advance the schedule only if the scale did not fall in scaler.update()",
            )


def _nothing(*args: Any) -> None:
    pass


@contextmanager
def _around(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """Call ``before`` and ``after`` around one method of one object."""
    method = getattr(owner, name)
    replaced = name in vars(owner)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        try:
            return method(*args, **kwargs)
        finally:
            after(*args)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        if replaced:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
