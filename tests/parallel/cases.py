"""Every plan that is compared with one process, and the ranks that do it: all in one launch, for all test files here."""

import copy
import functools
import importlib.util
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from workbench.models.build import build_model
from workbench.models.config import VitConfig
from workbench.models.vit import VisionTransformer
from workbench.parallel.collectives import Collective, CollectiveSpy
from workbench.parallel.gradients import MeshGradScaler
from workbench.parallel.launch import launch
from workbench.parallel.mesh import build_mesh
from workbench.parallel.parallelize import parallelize, parameter_groups
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.step import train_step
from workbench.parallel.units import Units

WORLD = 4
SHAPE = VitConfig(
    width=16, depth=2, heads=4, mlp_width=32, patch_size=4, image_size=8, num_classes=6, qk_norm=True, registers=1
)
EVEN = ((2, 2),) * WORLD
UNEVEN = ((3, 1), (2, 2), (4, 3), (1, 5))


@dataclass(frozen=True)
class Case:
    plan: dict[str, Any]
    sizes: tuple[tuple[int, ...], ...] = ((4,),) * WORLD
    """Samples of each micro-batch of each rank that holds samples of its own."""
    dtype: torch.dtype = torch.float64
    model: str = "vit"
    tied: tuple[str, str] | None = None
    frozen: tuple[str, ...] = ()
    max_norm: float | None = None
    scale: float | None = None
    poisoned: int | None = None
    """A rank with an infinite gradient of its own, after the ranks have exchanged theirs."""
    tolerance: float = 1e-10


def fp32(**fields: Any) -> dict[str, Any]:
    """A plan that leaves the parameters' dtype alone."""
    return {"param_dtype": "fp32", "reduce_dtype": "fp32", **fields}


FSDP, DDP, HSDP = fp32(shard=4), fp32(replicate=4), fp32(replicate=2, shard=2)
TP_REPLICATED, TP_FSDP = fp32(replicate=2, tensor=2), fp32(shard=2, tensor=2)
ACROSS_BLOCKS = ("blocks.0.mlp.fc1", "blocks.1.mlp.fc1")
WITHIN_A_BLOCK = ("blocks.1.norm1", "blocks.1.norm2")
FROZEN = ("patch_embed", "blocks.0", "blocks.1.attn.qkv")

CASES: dict[str, Case] = {
    "ddp": Case(DDP),
    "ddp, accumulated": Case(DDP, EVEN),
    "ddp, uneven micro-batches": Case(DDP, UNEVEN),
    "ddp, clipped": Case(DDP, max_norm=0.05),
    "ddp, frozen": Case(DDP, frozen=FROZEN),
    "ddp, tied": Case(DDP, tied=ACROSS_BLOCKS),
    "ddp, recomputed": Case({**DDP, "recomputation": "full"}),
    "ddp, scaled": Case(DDP, scale=1024.0),
    "ddp, overflow on one rank": Case(DDP, scale=1024.0, poisoned=1),
    "fsdp": Case(FSDP),
    "fsdp, not resharded": Case({**FSDP, "reshard_after_forward": False}),
    "fsdp, prefetched": Case({**FSDP, "prefetch_forward": 2, "prefetch_backward": 1}),
    "fsdp, offloaded": Case({**FSDP, "cpu_offload": True}, max_norm=0.05),
    "fsdp, recomputed selectively": Case({**FSDP, "recomputation": "selective"}),
    "fsdp, recomputed": Case({**FSDP, "recomputation": "full"}),
    "fsdp, accumulated, synchronised each": Case({**FSDP, "sync_each": True}, EVEN),
    "fsdp, accumulated, synchronised last": Case(FSDP, EVEN),
    "fsdp, uneven micro-batches": Case(FSDP, UNEVEN),
    "fsdp, clipped": Case(FSDP, max_norm=0.05),
    "fsdp, frozen": Case(FSDP, frozen=FROZEN, max_norm=0.05),
    "fsdp, tied across blocks": Case(FSDP, tied=ACROSS_BLOCKS, max_norm=0.05),
    "fsdp, tied within a block": Case(FSDP, tied=WITHIN_A_BLOCK, max_norm=0.05),
    "fsdp, scaled": Case(FSDP, scale=1024.0, max_norm=0.05),
    "fsdp, overflow on one rank": Case(FSDP, scale=1024.0, poisoned=2),
    "fsdp, fp32": Case(FSDP, dtype=torch.float32, tolerance=1e-5),
    "fsdp, bf16": Case({**FSDP, "param_dtype": "bf16"}, dtype=torch.float32, tolerance=0.05),
    "fsdp, fp16, scaled": Case(
        {**FSDP, "param_dtype": "fp16", "loss_scaling": True}, dtype=torch.float32, scale=1024.0, tolerance=0.02
    ),
    "fsdp, recomputed, compiled": Case({**FSDP, "recomputation": "full", "compile": True}),
    "fsdp, a user's module": Case(FSDP, model="mlp"),
    "hsdp": Case(HSDP),
    "hsdp, uneven micro-batches, clipped": Case(HSDP, UNEVEN, max_norm=0.05),
    "hsdp, overflow on one rank": Case(HSDP, scale=1024.0, poisoned=3),
    "tp, replicated": Case(TP_REPLICATED, EVEN[:2], max_norm=0.05),
    "tp alone": Case(fp32(tensor=4), EVEN[:1], max_norm=0.05),
    "tp with fsdp": Case(TP_FSDP, EVEN[:2]),
    "tp with fsdp, recomputed, clipped": Case({**TP_FSDP, "recomputation": "full"}, UNEVEN[:2], max_norm=0.05),
    "tp with fsdp, recomputed selectively": Case({**TP_FSDP, "recomputation": "selective"}, EVEN[:2]),
    "tp with fsdp, overflow on one rank": Case(TP_FSDP, EVEN[:2], scale=1024.0, poisoned=1),
}
if importlib.util.find_spec("transformers"):
    CASES["hf vit, fsdp"] = Case(FSDP, model="hf")
    CASES["hf vit, tp with fsdp"] = Case(TP_FSDP, EVEN[:2], model="hf", max_norm=0.05)


@dataclass
class Outcome:
    """What a rank saw, and how far from one process: errors are the largest differences over the largest value."""

    loss_error: float
    norm_error: float
    gradient_errors: dict[str, float]
    weight_error: float
    weight_change: float
    skipped: bool
    scale: float | None
    clipped: bool
    calls: list[Collective] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@functools.cache
def outcomes() -> list[dict[str, Outcome | str]]:
    """Of each rank, every case's outcome, or the error that it ended with."""
    return launch(run_cases, WORLD, timeout=60, device_type="cpu")


def outcome(name: str, rank: int = 0) -> Outcome:
    found = outcomes()[rank][name]
    assert isinstance(found, Outcome), found
    return found


# ---- on each rank


def run_cases() -> dict[str, Outcome | str]:
    torch.set_num_threads(1)
    found: dict[str, Outcome | str] = {}
    for name, case in CASES.items():
        try:
            found[name] = run_case(case)
        except Exception:  # one plan's error is that plan's test's
            found[name] = traceback.format_exc()
    return found


class UserBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module
    if case.model == "mlp":
        layers = nn.Sequential(*(UserBlock() for _ in range(3)))
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), layers, nn.Linear(16, 6))
    elif case.model == "hf":
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        model = build_model("hf:vit", num_classes=6, image_size=8, in_channels=3, patch_size=4, **shape)
    else:
        model = VisionTransformer(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():  # a ViT's head begins at zero, and no gradient passes a zero
            parameter.add_(0.2 * torch.randn_like(parameter))
    if case.tied:
        first, second = map(model.get_submodule, case.tied)
        second.weight = first.weight
    for name in case.frozen:
        model.get_submodule(name).requires_grad_(False)
    return model.to(case.dtype)


def run_case(case: Case) -> Outcome:
    plan = ParallelPlan(**case.plan)
    mesh = build_mesh(plan, "cpu")
    model = make_model(case)
    alone = copy.deepcopy(model)
    sizes = [size for rank in case.sizes for size in rank]
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(sizes), 3, 8, 8, generator=generator, dtype=torch.float64).to(case.dtype)
    labels = torch.randint(6, (sum(sizes),), generator=generator)

    # Ranks that differ along the tensor axis only see the same samples.
    mine = dist.get_rank() // plan.tensor
    start = sum(map(sum, case.sizes[:mine]))
    end = start + sum(case.sizes[mine])
    batches = list(
        zip(images[start:end].split(case.sizes[mine]), labels[start:end].split(case.sizes[mine]), strict=True)
    )

    # Traced as ever, but run by operators: to generate code takes longer than all else here.
    traced = partialmethod(nn.Module.compile, backend="eager")
    with mock.patch.object(nn.Module, "compile", traced):
        wrapped = parallelize(model, plan, mesh, units=Units(blocks="2.*") if case.model == "mlp" else None)
    optimizer = torch.optim.SGD(parameter_groups(wrapped), lr=0.1, foreach=True)
    scaler = Poisoned(case) if case.scale else None
    before = weights(alone)
    gradients: dict[str, Tensor] = {}
    spy = CollectiveSpy(mesh)
    with nullcontext() if plan.compile else spy:
        step = train_step(
            wrapped,
            optimizer,
            batches,
            F.cross_entropy,
            mesh,
            global_samples=len(labels) if case.sizes != UNEVEN else None,
            max_norm=case.max_norm,
            scaler=scaler,
            sync_each=plan.sync_each,
            before_clipping=lambda: gradients.update(whole_gradients(wrapped, spy)),
        )

    loss = F.cross_entropy(alone(images), labels)
    loss.backward()
    expected = whole_gradients(alone)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), case.max_norm or float("inf"))
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    after, now = weights(alone), weights(wrapped)
    # Of the whole gradient: that of a shift of all keys is zero but for rounding.
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert gradients.keys() == expected.keys() and after.keys() == now.keys()
    return Outcome(
        loss_error=error(step.loss, loss.detach()),
        norm_error=error(step.grad_norm, norm),
        gradient_errors={name: error(gradients[name], grad, largest) for name, grad in expected.items()},
        weight_error=max(error(now[name], after[name]) for name in after),
        weight_change=max(error(now[name], before[name]) for name in before),
        skipped=step.skipped,
        scale=scaler.get_scale() if scaler else None,
        clipped=case.max_norm is not None and norm.item() > case.max_norm,
        calls=spy.calls,
        shapes={name: tuple(p.shape) for name, p in alone.named_parameters()},
    )


class Poisoned(MeshGradScaler):
    """Puts an infinity into one rank's own part of a gradient, where nothing but the scaler can tell the others."""

    def __init__(self, case: Case) -> None:
        assert case.scale is not None
        super().__init__("cpu", init_scale=case.scale)
        self.poisoned = case.poisoned

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() == self.poisoned:
            grad = optimizer.param_groups[0]["params"][-2].grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(float("inf"))
        super().unscale_(optimizer)


def error(got: Tensor, expected: Tensor, largest: float | None = None) -> float:
    return ((got.double() - expected.double()).abs().max() / (largest or expected.double().abs().max())).item()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return joined({name: whole(p.detach()) for name, p in model.named_parameters()})


def whole_gradients(model: nn.Module, spy: CollectiveSpy | None = None) -> dict[str, Tensor]:
    """Gradients in full on every rank; what gathering them for the test costs is not recorded."""
    calls = len(spy.calls) if spy else 0
    found = joined({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    if spy:
        del spy.calls[calls:]
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of one process: without the wrappers', and q, k and v in one again."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        for part in range(3):
            plain = plain.replace(f".parts.{part}.", ".")
        found.setdefault(plain, []).append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}
