"""What the trainer adds to a hand-written PyTorch loop that takes the same steps.

    python tests/benchmarks/bench_trainer_overhead.py [--model vit-micro] [--batch 64] [--precision fp32] [--out FILE]

The loops must come to the same weights from the same start; then they take turns on one model, in blocks of alternating order,
on two clocks: wall time, and the CPU time of this process, which on a CPU counts the loop's own work and not the turns of other
processes. Expected: the interval on the ratio lies below 1.02, on the wall clock where the machine is idle. About a minute.

The interval is one process's. Processes differ by about 1 % either way; in one, a bare loop whose step is a function of its own
took 2 % more than the same loop written out, mostly in system time, perhaps because memory is freed at other points. So
repeat a run before believing 1 %. What the trainer itself costs per step shows where the model costs nothing:
``--model tests.trainer.runs:with_dropout --batch 16 --steps 20 --rounds 200``.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from workbench.experiment.statistics import log_ratio_interval
from workbench.records.provenance import collect
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import Trainer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SAME = 1e-6
"""Largest difference of two weights that took the same steps, to which kernels without a fixed order may add."""


def bare_loop(trainer: Trainer, config: TrainConfig) -> Callable[[int], None]:
    """The loop that one would write by hand, over the model, data and optimizer of a trainer."""
    model, optimizer, data, device = trainer.model, trainer.optimizer, trainer.loader, trainer.device
    dtype = DTYPES.get(config.precision)
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def run(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(data)
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


def largest_difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def check_same_steps(config: TrainConfig, steps: int) -> float:
    """The largest difference between weights that the two loops trained from the same start."""
    trainers = []
    for loop in (lambda trainer: trainer.train, lambda trainer: bare_loop(trainer, config)):
        trainers.append(trainer := Trainer(config))  # which seeds what the model draws
        loop(trainer)(steps)
    difference = largest_difference(*(trainer.model for trainer in trainers))
    if difference > SAME:
        raise SystemExit(f"the loops do not take the same steps: weights differ by {difference:g} after {steps}")
    return difference


def measure(config: TrainConfig, rounds: int, steps: int) -> dict[str, Any]:
    difference = check_same_steps(config, 5)
    # On one trainer, turn by turn: two copies of a model lie differently in memory, and that alone may cost one of them.
    trainer = Trainer(config)
    loops: dict[str, Callable[[int], Any]] = {"ours": trainer.train, "bare": bare_loop(trainer, config)}

    def block(name: str) -> dict[str, float]:
        before = {clock: read() for clock, read in CLOCKS.items()}
        loops[name](steps)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return {clock: (read() - before[clock]) / steps for clock, read in CLOCKS.items()}

    for name in loops:
        block(name)
    taken: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
    for number in range(rounds):
        for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
            taken[name].append(block(name))
    return {"weights_differ_by": difference, "rounds": rounds, **{clock: compared(taken, clock) for clock in CLOCKS}}


def compared(taken: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Any]:
    """Ratio of the two loops on one clock, from paired log-ratios of neighbouring blocks, with its 95 % interval."""
    times = {name: [block[clock] for block in blocks] for name, blocks in taken.items()}
    ratios = [math.log(a / b) for a, b in zip(times["ours"], times["bare"], strict=True)]
    interval = log_ratio_interval(ratios, 0.95)
    return {
        "ratio": interval.ratio,
        "low": interval.low,
        "high": interval.high,
        "median_ratio": math.exp(statistics.median(ratios)),
        "median_step_s": {name: statistics.median(values) for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit-micro")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = TrainConfig(
        model=options.model,
        data=options.data,
        global_batch=options.batch,
        precision=options.precision,
        device=options.device,
        schedule="constant",
        warmup_steps=0,
    )
    result = measure(config, options.rounds, options.steps)
    for clock in CLOCKS:
        c = result[clock]
        verdict = "within 2 %" if c["high"] < 1.02 else "not shown to be within 2 %"
        step = {name: f"{1000 * seconds:.2f} ms" for name, seconds in c["median_step_s"].items()}
        print(
            f"{clock}: ours / bare {c['ratio']:.4f} [{c['low']:.4f}, {c['high']:.4f}], median {c['median_ratio']:.4f}, "
            f"{options.rounds} rounds of {options.steps} steps: {verdict}; median step {step}"
        )
    if options.out:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": vars(options),
            "provenance": collect(),
            **result,
        }
        options.out.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
