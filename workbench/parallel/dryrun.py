"""What one rank of a plan needs, known before the job: the real wrapped step, in a world that is not there.

With a GPU the step runs on it and the allocator's own peak is read. Without one it runs on fake tensors, of which nothing is
allocated, and a ledger of their storages is replayed through a model of the allocator.
"""

import gc
import time
import warnings
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.errors import Refused
from workbench.models.build import build_model
from workbench.models.config import check_model
from workbench.parallel.fake import (
    fake_world,
    kinds_of_buffers,
    settle,
    without_initialisation,
    wrappers_on_fake_tensors,
)
from workbench.parallel.ledger import Ledger, Peak
from workbench.parallel.mesh import build_mesh
from workbench.parallel.parallelize import parallelize
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.rules import check
from workbench.parallel.step_memory import STEPS, TrainingStep, follow

Method = Literal["fake tensors", "allocator"]
IMAGES = {"num_classes": 1000, "image_size": 224, "in_channels": 3}


class DryRun(BaseModel):
    """The memory of the first rank, whose parts are the largest where they are uneven.

    Attributes:
        batch: samples per rank and forward pass.
        peak_bytes: most bytes allocated at one time, over whole steps.
        reserved_bytes: most bytes that the caching allocator took from the device; what lies between is fragmentation.
        breakdown: what the bytes at the peak were for; empty when the allocator was read, which does not know. ``gathered`` are
            whole parameters of the moment and buffers of collectives; ``workspace`` is cuBLAS's, ``rounding`` the allocator's.
        host_bytes: what the plan keeps in host memory.
        phase: in which part of the step the peak came.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    world: int
    plan: dict[str, Any]
    batch: int
    method: Method
    peak_bytes: int
    reserved_bytes: int
    breakdown: dict[str, int] = {}
    host_bytes: int = 0
    phase: str = ""
    seconds: float = 0.0


def dry_run(
    model: str,
    plan: ParallelPlan,
    *,
    world: int,
    batch: int = 1,
    method: Method = "fake tensors",
    model_args: dict[str, Any] | None = None,
) -> DryRun:
    """Take steps as the first of ``world`` ranks under ``plan``, and see what they need.

    Args:
        batch: samples per rank and forward pass.
        method: ``allocator`` takes the steps on this process's GPU, ``fake tensors`` on none.

    Raises:
        Refused: an unknown model, a plan that cannot compose or that does not fit the world, no GPU where one is asked for.
    """
    check_model(model)
    check(plan, world, model)
    for name, value in (("batch", batch), ("world", world)):
        if value < 1:
            raise Refused(name, value, allowed="1 or more")
    for what, there in (("compile", plan.compile), ("a pipeline", plan.pipeline > 1)):
        if there:
            raise Refused(f"dry run of a plan with {what}", allowed="eager steps of a whole model", fix="leave it out")
    began = time.monotonic()
    with fake_world(world), without_initialisation(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strides and streams that are not there
        run = _on_gpu if method == "allocator" else _on_fake_tensors
        peak = run(model, plan, batch, model_args or {})
    return DryRun(
        model=model,
        world=world,
        plan=plan.model_dump(mode="json"),
        batch=batch,
        method=method,
        peak_bytes=peak.allocated,
        reserved_bytes=peak.reserved,
        breakdown=peak.breakdown,
        host_bytes=peak.host,
        phase=peak.phase,
        seconds=round(time.monotonic() - began, 1),
    )


def _on_fake_tensors(name: str, plan: ParallelPlan, batch: int, model_args: dict[str, Any]) -> Peak:
    mesh = build_mesh(plan, "cpu")
    with FakeTensorMode(), wrappers_on_fake_tensors(), Ledger("cpu") as ledger, kinds_of_buffers(ledger):
        model = settle(parallelize(build_model(name, **IMAGES, **model_args), plan, mesh))
        step = TrainingStep(model, autocast=autocast_dtype(plan), shards=True)
        return follow(step, ledger, _inputs(batch, "cpu"), on_host=plan.cpu_offload)


def _on_gpu(name: str, plan: ParallelPlan, batch: int, model_args: dict[str, Any]) -> Peak:
    if not torch.cuda.is_available():
        raise Refused("method", "allocator", allowed="fake tensors, since no GPU is here")
    mesh = build_mesh(plan, "cuda")
    with torch.device("meta"):
        plain = build_model(name, **IMAGES, **model_args)
    if _replicated(plan):
        plain = plain.to_empty(device="cuda")
    model = settle(parallelize(plain, plan, mesh))
    if not _replicated(plan):
        model.to_empty(device="cpu" if plan.cpu_offload else "cuda")
    step, inputs = TrainingStep(model, autocast=autocast_dtype(plan)), _inputs(batch, "cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step.forward(*inputs).backward()
        step.update()
    peak = Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), {}, "", 0)
    del model, plain, step
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _inputs(batch: int, device: str) -> tuple[Tensor, Tensor]:
    size = IMAGES["image_size"]
    images = torch.zeros(batch, IMAGES["in_channels"], size, size, device=device)
    return images, torch.zeros(batch, dtype=torch.long, device=device)


def _replicated(plan: ParallelPlan) -> bool:
    """Whether every rank holds the whole model, as it comes; else FSDP wraps it."""
    return plan.shard == 1 and plan.tensor == 1


def autocast_dtype(plan: ParallelPlan) -> torch.dtype | None:
    """FSDP casts parameters itself; where they are replicated it is autocast that does."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return half.get(plan.param_dtype) if _replicated(plan) else None
