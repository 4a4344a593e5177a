"""A training on gloo ranks that keeps checkpoints and says where it is, so that it can be killed there.

    python -m tests.parallel.killed FOLDER STEPS WORLD

Prints a hash of the final weights as JSON.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from workbench.parallel.checkpoint import Checkpoints, RunState
from workbench.parallel.launch import launch

EVERY = 5
"""Steps between two checkpoints."""
PHASES = ("start", "forward", "collective", "checkpoint")


class Whereabouts:
    """One small file per rank with its process id, step and phase."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = (folder / f"rank-{rank}").open("wb", buffering=0)

    def say(self, step: int, phase: str) -> None:
        self.file.seek(0)
        self.file.write(f"{os.getpid()} {step} {phase}".ljust(40).encode())


def train(folder: Path, steps: int) -> dict[str, str]:
    """Plain data parallelism by hand: every step has a forward, a collective, and every fifth a checkpoint in the background."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here = Whereabouts(folder, rank)
    here.say(-1, "start")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    state = RunState(model, optimizer, counters={"step": 0}, identity={"steps": steps})
    checkpoints = Checkpoints(folder / "checkpoints")
    begun = checkpoints.load(state) or 0
    if rank == 0:
        (folder / "begun").write_text(str(begun))
    for step in range(begun, steps):
        here.say(step, "forward")
        time.sleep(0.01)
        x = torch.randn(32, 256)
        loss = (model(x) - x).square().mean()
        loss.backward()
        here.say(step, "collective")
        if rank == step % world:
            time.sleep(0.01)  # the others wait for it inside
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        state.counters["step"] = step + 1
        if (step + 1) % EVERY == 0:
            here.say(step, "checkpoint")
            checkpoints.save(state)
            if (step + 1) % (2 * EVERY) == 0:
                checkpoints.wait()
    checkpoints.close()
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"weights": hashlib.sha256(content).hexdigest()}


def main(folder: Path, steps: int, world: int) -> None:
    outcomes = launch(train, world, folder, steps, timeout=120)
    print(json.dumps(outcomes[0]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
