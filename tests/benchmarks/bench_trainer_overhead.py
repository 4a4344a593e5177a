"""What the trainer adds to a hand-written PyTorch loop that takes the same steps.

    python tests/benchmarks/bench_trainer_overhead.py [--model vit-micro] [--batch 64] [--precision fp32] [--out FILE]

Both loops hold the same model, data, optimizer and clipping, in one process, and take turns in blocks of alternating order.
Expected: the interval on the ratio of their times lies below 1.02. About a minute on two cores.
"""

import argparse
import json
import math
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


def bare_loop(trainer: Trainer, config: TrainConfig) -> Callable[[int], None]:
    """The loop that one would write by hand, over the model, data and optimizer of a trainer of its own."""
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


def measure(config: TrainConfig, rounds: int, steps: int) -> dict[str, Any]:
    ours = Trainer(config)
    loops: dict[str, Callable[[int], Any]] = {"ours": ours.train, "bare": bare_loop(Trainer(config), config)}
    for run in loops.values():
        run(5)
    ratios, times = [], {"ours": [], "bare": []}
    for number in range(rounds):
        for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
            start = time.perf_counter()
            loops[name](steps)
            if ours.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / steps)
        ratios.append(math.log(times["ours"][-1] / times["bare"][-1]))
    interval = log_ratio_interval(ratios, 0.95)
    median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    return {
        "ratio": interval.ratio,
        "low": interval.low,
        "high": interval.high,
        "median_step_s": median,
        "rounds": rounds,
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
    verdict = "within 2 %" if result["high"] < 1.02 else "not shown to be within 2 %"
    figure = f"{result['ratio']:.4f} [{result['low']:.4f}, {result['high']:.4f}]"
    print(
        f"ours / bare: {figure} over {options.rounds} rounds of {options.steps} steps: {verdict}; {result['median_step_s']}"
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
