"""Runs on gloo ranks whose checkpoints are saved and loaded."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import Refused
from workbench.parallel.checkpoint import Checkpoints, RunState


class Position:
    """Stands for a data loader."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def make(wrapper: str = "fsdp", *, width: int = 30, seed: int = 0, learning_rate: float = 1e-2) -> RunState:
    """A small run; a width of 30 divides unevenly among four."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    model[0].bias.requires_grad_(False)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif wrapper == "ddp":
        model = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, foreach=True)
    torch.manual_seed(100 + dist.get_rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.zeros(1))
    identity = {"learning_rate": learning_rate}
    return RunState(model, optimizer, {"scaler": scaler, "data": Position()}, {"step": 0, "updates": 0}, identity)


def train(state: RunState, steps: int) -> None:
    scaler: Any = state.parts["scaler"]
    for _ in range(steps):
        loss = state.model(torch.randn(5, 6)).square().mean()
        scaler.scale(loss).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        scaler._growth_tracker += 1
        state.parts["data"].seen += 5  # type: ignore[attr-defined]
        state.counters = {"step": state.counters["step"] + 1, "updates": state.counters["updates"] + 1}


def summary(state: RunState) -> dict[str, Any]:
    """Everything that a checkpoint must keep, in a form that ranks and worlds can compare. Weights and moments are whole."""
    weights = {n.removeprefix("module."): _hash(p) for n, p in state.model.named_parameters()}
    moments = [
        {key: _hash(value) for key, value in sorted(entry.items())}
        for entry in state.optimizer.state_dict()["state"].values()
    ]
    return {
        "weights": weights,
        "moments": moments,
        "rate": state.optimizer.param_groups[0]["lr"],
        "parts": {name: part.state_dict() for name, part in state.parts.items()},
        "counters": state.counters,
        "random": _hash(torch.get_rng_state()),
    }


def _hash(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        value = value.detach().numpy().tobytes()
    return hashlib.sha256(bytes(value)).hexdigest()[:12]


def begin(folder: Path, wrapper: str, steps: int, rank: int) -> dict[str, Any]:
    """Train, save, and change everything while the save goes on."""
    state, checkpoints = make(wrapper), Checkpoints(folder)
    train(state, steps)
    saved = summary(state)
    checkpoints.save(state)
    train(state, 2)
    checkpoints.close()
    return saved


def go_on(folder: Path, wrapper: str, rank: int) -> dict[str, Any]:
    """Load into a run of another seed, and save it again."""
    state, checkpoints = make(wrapper, seed=1), Checkpoints(folder)
    assert checkpoints.load(state) == state.counters["step"]
    loaded = summary(state)
    checkpoints.save(state)
    checkpoints.close()
    return loaded


def newest(folder: Path, rank: int) -> tuple[int | None, dict[str, Any]]:
    """The step that a fresh run goes on from, and its state."""
    state, checkpoints = make(), Checkpoints(folder)
    step = checkpoints.load(state)
    return step, summary(state)


def refused(folder: Path, changes: dict[str, Any], rank: int) -> tuple[str, bool]:
    """What loading into another run says, and whether that run is as it was."""
    state, checkpoints = make(**changes), Checkpoints(folder)
    before = summary(state)
    try:
        checkpoints.load(state)
    except Refused as refusal:
        return str(refusal), summary(state) == before
    return "", False


def spoil_then_save(folder: Path, rank: int) -> str:
    """One weight of the last rank's part becomes NaN, of which the other ranks see nothing."""
    state, checkpoints = make(), Checkpoints(folder)
    checkpoints.load(state)
    if rank == dist.get_world_size() - 1:
        with torch.no_grad():
            state.model[3].weight.to_local()[0, 0] = torch.nan  # type: ignore[index,union-attr,operator]
    state.counters = {"step": 99, "updates": 99}
    try:
        checkpoints.save(state)
    except Refused as refusal:
        return str(refusal)
    return ""
