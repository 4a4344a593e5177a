"""Kill one rank of a running training where it is said to be, and see what is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.parallel.killed import PHASES
from workbench.parallel.checkpoint import MANIFEST

ROOT = Path(__file__).parents[2]
LIMIT_S = 30
"""Within which everything must have ended after a kill."""


def begin(folder: Path, steps: int, world: int) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("rank-*"), folder / "begun"):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.parallel.killed", str(folder), str(steps), str(world)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, str]:
    """The outcome of a run that nobody kills."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    outcome: dict[str, str] = json.loads(out.strip().splitlines()[-1])
    return outcome


def kill(folder: Path, process: subprocess.Popen[str], rank: int, phase: str, after: int) -> dict[str, Any]:
    """Wait until ``rank`` says that it is in ``phase``, ``after`` steps or more from where the run began, and send it SIGKILL.

    Returns what was seen: where the rank was, the last step with a whole checkpoint then, seconds until all had ended, processes
    left, the exit code, and whether the rank was named.
    """
    while not is_there(folder, rank, phase, after):
        if process.poll() is not None:
            raise RuntimeError(f"rank {rank} never was in {phase} {after} steps on: {process.communicate()[1][-2000:]}")
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.005))  # somewhere in it
    started = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    whole = [int(path.parent.name[5:13]) for path in folder.glob(f"checkpoints/step-*/{MANIFEST}")]
    at = whereabouts(folder, rank)
    assert at is not None
    os.kill(at[0], signal.SIGKILL)
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
    while (left := [pid for pid in started if running(pid)]) and time.monotonic() - began < LIMIT_S:
        time.sleep(0.05)
    return {
        "rank": rank,
        "step": at[1],
        "phase": at[2],
        "last_checkpoint": max(whole, default=0),
        "ended_after_s": round(time.monotonic() - began, 2),
        "left": len(left),
        "exit": process.returncode,
        "named": f"rank {rank}" in err.lower(),
    }


def is_there(folder: Path, rank: int, phase: str, after: int) -> bool:
    at = whereabouts(folder, rank)
    if at is None or at[2] != phase:
        return False
    return phase == "start" or at[1] >= int((folder / "begun").read_text()) + after


def whereabouts(folder: Path, rank: int) -> tuple[int, int, str] | None:
    """Process id, step and phase that a rank last wrote down."""
    try:
        pid, step, phase = (folder / f"rank-{rank}").read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid), int(step), phase


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ordeal(root: Path, kills: int, *, world: int, seed: int, phases: Sequence[str] = PHASES) -> dict[str, Any]:
    """Train to the end, killed ``kills`` times on the way and launched again each time; beside a run that nobody killed.

    A kill strikes a random rank, at its start, in a forward, in a collective and in a checkpoint in turn.
    """
    draw, folder, steps = random.Random(seed), root / "killed", 10 * kills + 20
    rounds: list[dict[str, Any]] = []
    for k in range(kills + 1):
        process = begin(folder, steps, world)
        if k < kills:
            seen = kill(folder, process, draw.randrange(world), phases[k % len(phases)], draw.randrange(10))
        else:
            weights = finish(process)["weights"]
        if rounds and (folder / "begun").exists():  # a kill at the start leaves none
            resumed = int((folder / "begun").read_text())
            for last in [r for r in rounds if "resumed_at" not in r]:
                last |= {"resumed_at": resumed, "steps_lost": max(last["step"] - resumed, 0)}
        if k < kills:
            rounds.append(seen)
    same = weights == finish(begin(root / "left alone", steps, world))["weights"]
    return {"same_weights": same, "rounds": [r | {"good": is_good(r)} for r in rounds]}


def is_good(seen: dict[str, Any]) -> bool:
    ended = seen["left"] == 0 and seen["ended_after_s"] < LIMIT_S and seen["exit"] not in (0, None)
    return bool(ended and seen["named"] and seen["resumed_at"] >= seen["last_checkpoint"])
