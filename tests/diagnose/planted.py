"""The faults of mixed-precision training, planted one by one in a loop that is otherwise right.

``loop(plant="…")`` trains a tiny model under an audit and returns what was found; ``loop()`` is the healthy control. The
first steps calibrate the loss scale and skip updates, as they do in life, so every control contains skipped steps.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from workbench.diagnose.audit import StepAudit
from workbench.diagnose.checks import check_accumulation, check_grad_norm
from workbench.diagnose.nonfinite import FirstNonFinite
from workbench.diagnose.scaling import ScaleRecord, ScaleWatch
from workbench.diagnose.symptom import Symptom

STEPS, LATE = 14, 10
INIT_SCALE = 2.0**22
"""Overflows for a few steps, which the calibration skips; by ``LATE`` it is over."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.norm, self.hidden, self.head = nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x_BD[:, None])))
        return self.head(F.gelu(self.hidden(self.norm(y.flatten(1)))))


def batches(seed: int, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def loop(plant: str = "", *, half: bool = True, optimizer: str = "sgd", seed: int = 0) -> list[Symptom]:
    """Train for ``STEPS`` steps with at most one fault; what the audit and the scale watch found."""
    torch.manual_seed(seed)
    model = Net()
    update: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(update, total_iters=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, enabled=half)
    watch, audit = ScaleWatch(floor=1.0), StepAudit(model, update, scaler=scaler, scheduler=schedule)
    blocks = contextlib.ExitStack()
    with audit.attached(), blocks:
        if plant == "one long autocast block":
            blocks.enter_context(torch.autocast("cpu", dtype=torch.float16))
        for step, (x, y) in enumerate(batches(seed)):
            if plant == "infinite batch into BatchNorm" and step == LATE:
                x = x * torch.inf
            with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            if plant != "clip before unscale":
                scaler.unscale_(update)
            max_norm = -1.0 if plant == "negative max_norm" else 1.0
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scale = float(scaler.get_scale())
            scaler.step(update)
            if plant == "double optimizer step" and step == LATE:
                update.step()
            scaler.update()
            skipped = half and float(scaler.get_scale()) < scale
            if not skipped or plant == "schedule on skipped step":
                schedule.step()
            update.zero_grad()
            watch.observe(ScaleRecord(step, scale, skipped))
            if plant == "resume without scaler state" and step == LATE:
                scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=INIT_SCALE).state_dict())
    return audit.symptoms + watch.symptoms


def infinite_gradient(planted: bool) -> list[Symptom]:
    """fp32, no scaler: an operator whose gradient is infinite at one step, then ``clip_grad_norm_``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = StepAudit(model, update)
    with audit.attached():
        for step, (x, y) in enumerate(batches(0, 2)):
            logits = model(x)
            if planted and step == 1:
                # sqrt at 0 is 0 with an infinite slope: the loss stays finite.
                logits = logits + (model[0].bias[0] - model[0].bias[0].detach()).abs().sqrt()
            F.cross_entropy(logits, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            update.zero_grad()
    return audit.symptoms


def endless_overflow(planted: bool) -> list[Symptom]:
    """A layer whose fp16 forward overflows at every step; the watch asks the finder for the first operator to blame."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
    if planted:
        with torch.no_grad():
            model[2].weight.mul_(1e6)
    update = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    watch, finder = ScaleWatch(floor=1.0), FirstNonFinite(model, policy="skip")
    for step, (x, y) in enumerate(batches(0, 20)):
        with finder.watch(step):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
            scaler.scale(F.cross_entropy(logits.float(), y)).backward()
        scale = float(scaler.get_scale())
        scaler.step(update)
        scaler.update()
        update.zero_grad()
        layer, rank = (finder.found.module, finder.found.rank) if finder.found else ("", 0)
        watch.observe(ScaleRecord(step, scale, float(scaler.get_scale()) < scale, layer, rank))
        if watch.stop:
            break
    return watch.symptoms


def uneven_micro_batches(planted: bool) -> list[Symptom]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = next(batches(0))
    parts = list(zip(x.split(6), y.split(6), strict=True))  # 6, 6 and 4 samples
    for images, labels in parts:
        weight = 1 / len(parts) if planted else len(labels) / len(y)
        (F.cross_entropy(model(images), labels) * weight).backward()
    found = check_accumulation(model, F.cross_entropy, parts)
    return [found] if found else []


def no_sync(rank: int, planted: bool) -> tuple[list[Symptom], bool]:
    """Two micro-batches, the first without synchronisation; also whether the ranks' gradients differed after it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    update = torch.optim.SGD(ddp.parameters(), lr=0.1)
    audit, differed = StepAudit(ddp, update), False
    with audit.attached():
        for k, (x, y) in enumerate(batches(rank, 4)):
            if k % 2:
                F.cross_entropy(ddp(x), y).backward()
                update.step()
                update.zero_grad()
                continue
            if planted:
                loss = F.cross_entropy(ddp(x), y)
                with ddp.no_sync():
                    loss.backward()
            else:
                with ddp.no_sync():
                    F.cross_entropy(ddp(x), y).backward()
            differed = not _equal_over_ranks(ddp.module[0].weight.grad)
    return audit.symptoms, differed


def shard_norm(rank: int, planted: bool) -> list[Symptom]:
    """The norm logged under FSDP2, from a rank's own shards or from all; parameters lie on two meshes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model[2], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    x, y = next(batches(rank))
    F.cross_entropy(model(x), y).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if planted:
        own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        logged = float(torch.nn.utils.get_total_norm(own))
    else:
        logged = float(torch.cat([_full(g).flatten() for g in grads]).norm())
    found = check_grad_norm(grads, logged)
    return [found] if found else []


def on_ranks(rank: int) -> dict[str, Any]:
    return {
        f"{name} {planted}": function(rank, planted)
        for name, function in (("no_sync", no_sync), ("norm", shard_norm))
        for planted in (True, False)
    }


def _full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _equal_over_ranks(tensor: Tensor | None) -> bool:
    assert tensor is not None
    everyone = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, tensor)
    return torch.equal(everyone[0], everyone[1])
