"""Throughput and peak memory of every precision: the trainer, a hand-written loop and Hugging Face Accelerate on the same step.

    python tests/benchmarks/bench_precision.py [--model vit-l] [--data synthetic:3x224x224:1000:256] [--batch 64] [--out FILE]

For each precision the loops take turns in one process, in alternating order; each figure is a ratio within a round. All
steps take one batch that lies on the device. The baseline of every speed-up is named in its row: fp32 without TF32, and
TF32. Accelerate is left out where it is missing.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench_trainer_overhead import bare_loop
from torch.nn import functional as F

from workbench.errors import Refused
from workbench.experiment.statistics import log_ratio_interval
from workbench.records.provenance import collect
from workbench.trainer.config import LossScaling, TrainConfig
from workbench.trainer.loop import Trainer

ARMS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16, no scaling": {"precision": "fp16", "loss_scaling": LossScaling(mode="none")},
    "fp16, static": {"precision": "fp16", "loss_scaling": LossScaling(mode="static")},
    "fp16, dynamic, interval 100": {"precision": "fp16", "loss_scaling": LossScaling(interval=100)},
    "fp16, dynamic, interval 2000": {"precision": "fp16", "loss_scaling": LossScaling(interval=2000)},
    "fp16, fp32 attention": {"precision": "fp16", "precision_rules": {"blocks.*.attn": "fp32"}},
    "fp8": {"precision": "fp8"},
}
Loop = Callable[[int], Any]


def accelerate_loop(trainer: Trainer, config: TrainConfig) -> Loop:
    """The same step through Accelerate, over the model, data and optimizer of a trainer of its own."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradScalerKwargs

    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is global, and set once otherwise
    scaling = config.loss_scaling
    handlers = [GradScalerKwargs(init_scale=scaling.init, growth_interval=scaling.interval)]
    accelerator = Accelerator(
        mixed_precision={"bf16": "bf16", "fp16": "fp16"}.get(config.precision, "no"), kwargs_handlers=handlers
    )
    model, optimizer = accelerator.prepare(trainer.model, trainer.optimizer)

    def run(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(trainer.loader)
            images, labels = images.to(trainer.device, non_blocking=True), labels.to(trainer.device, non_blocking=True)
            with accelerator.autocast():
                loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


def on_device(trainer: Trainer) -> Trainer:
    """The trainer with one batch that already lies on the device, so that the step is measured and not the data."""
    images, labels = next(trainer.loader)
    trainer.loader = itertools.repeat((images.to(trainer.device), labels.to(trainer.device)))  # type: ignore[assignment]
    return trainer


def loops_for(config: TrainConfig, name: str) -> tuple[dict[str, Loop], dict[str, int]]:
    """The loops that can do this arm, warmed up, and each one's peak bytes over what was held before it."""
    makers: dict[str, Callable[[Trainer, TrainConfig], Loop]] = {"ours": lambda trainer, _: trainer.train}
    if "attention" not in name and "static" not in name and "no scaling" not in name:
        makers |= {"bare": bare_loop, "accelerate": accelerate_loop}
    loops, peaks = {}, {}
    for maker, make in makers.items():
        cuda = torch.cuda.is_available()
        held = torch.cuda.memory_allocated() if cuda else 0
        try:
            loops[maker] = make(on_device(Trainer(config)), config)
        except ImportError as error:
            print(f"  {maker} left out: {error}")
            continue
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        loops[maker](4)
        peaks[maker] = torch.cuda.max_memory_allocated() - held if cuda else 0
    return loops, peaks


def measure(name: str, config: TrainConfig, rounds: int, steps: int) -> dict[str, Any]:
    loops, peaks = loops_for(config, name)
    times: dict[str, list[float]] = {loop: [] for loop in loops}
    for number in range(rounds):
        for loop in list(loops)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            loops[loop](steps)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[loop].append((time.perf_counter() - start) / steps)
    result: dict[str, Any] = {
        "samples_per_s": {k: config.global_batch / statistics.median(v) for k, v in times.items()},
        "peak_bytes": peaks,
    }
    for other in ("bare", "accelerate"):
        if other in times:
            ratios = [math.log(a / b) for a, b in zip(times["ours"], times[other], strict=True)]
            interval = log_ratio_interval(ratios, 0.95)
            result[f"ours / {other}, time"] = [round(v, 4) for v in (interval.ratio, interval.low, interval.high)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit-l")
    parser.add_argument("--data", default="synthetic:3x224x224:1000:256")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.arms:
        config = TrainConfig(
            model=options.model,
            data=options.data,
            global_batch=options.batch,
            schedule="constant",
            warmup_steps=0,
            learning_rate=1e-4,
            **ARMS[name],
        )
        try:
            results[name] = measure(name, config, options.rounds, options.steps)
        except Refused as refusal:
            results[name] = {"not available": str(refusal)}
        gc.collect()
        torch.cuda.empty_cache()
        print(name, json.dumps(results[name]), flush=True)
    for baseline in ("fp32", "tf32"):
        base = results.get(baseline, {}).get("samples_per_s", {}).get("ours")
        for result in results.values():
            if base and "samples_per_s" in result:
                result[f"speed-up over {baseline}"] = round(result["samples_per_s"]["ours"] / base, 3)
    if options.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "options": {k: v for k, v in vars(options).items() if k != "out"},
            "provenance": collect(),
            "arms": results,
        }
        options.out.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
