"""The planner's step time and peak memory against the trainer's, on this machine's device.

    PYTHONPATH=. python tests/benchmarks/bench_planner.py vit-b:64:fp32 vit-b:64:bf16 vit-b:64:bf16:attention=eager

A case is model:batch:precision, then fields of ``VitConfig`` or ``TrainConfig``. Measured is the median step on one batch that
lies on the device: the host's wait for data overlaps with the device's work, so that it cannot be subtracted. The error is
predicted / measured − 1.
"""

import argparse
import gc
import itertools
import json
import statistics
from typing import Any

import torch

from workbench.experiment.prediction import predict_arm
from workbench.hardware.facts import DeviceFacts, detect
from workbench.models.config import VitConfig, vit_config
from workbench.planner.predict import utilisation
from workbench.trainer.config import TrainConfig
from workbench.trainer.loop import Trainer

TITLE = f"{'case':44} {'step ms':>9} {'predicted':>9} {'error':>7}   {'peak GiB':>9} {'predicted':>9} {'error':>7}   {'MFU':>5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    options = parser.parse_args()
    facts = detect("auto")
    print(facts.model_dump_json(indent=1))
    print(TITLE)
    errors = []
    for case in options.cases:
        config = _config(case, options.image_size)
        errors.append(_compare(case, config, facts, options.warm_up, options.steps))
        gc.collect()
        if facts.kind == "cuda":
            torch.cuda.empty_cache()
    print(f"mean absolute error of step time: {statistics.fmean(map(abs, errors)):.1%}")


def _config(case: str, image_size: int) -> TrainConfig:
    model, batch, precision, *fields = case.split(":")
    settings: dict[str, Any] = {}
    model_args: dict[str, Any] = {}
    for field in fields:
        name, _, text = field.partition("=")
        value = json.loads(text) if text[0].isdigit() or text in ("true", "false") else text
        (model_args if name in VitConfig.model_fields else settings)[name] = value
    return TrainConfig(
        model=model,
        model_args=model_args,
        data=f"synthetic:3x{image_size}x{image_size}:1000",
        global_batch=int(batch),
        precision=precision,  # type: ignore[arg-type]
        **settings,
    )


def _compare(case: str, config: TrainConfig, facts: DeviceFacts, warm_up: int, steps: int) -> float:
    predicted = predict_arm(config, facts)
    assert predicted is not None
    trainer = Trainer(config)
    images, labels = next(trainer.loader)
    batch = images.to(trainer.device), labels.to(trainer.device)
    trainer.loader = itertools.repeat(batch)  # type: ignore[assignment]
    trainer.train(warm_up)
    trainer.peak_memory.reset()
    seconds = statistics.median(r.times.total for r in trainer.train(steps))
    peak = trainer.peak_memory.read()
    error = predicted.step_time / seconds - 1
    shape: Any = trainer.model
    vit = vit_config(config.model, **shape.config.model_dump())
    mfu = utilisation(vit, config.global_batch / seconds, facts, config.precision)
    if mfu and mfu > 1:
        raise RuntimeError(f"{case}: {mfu:.0%} of the peak was measured, so the measurement is wrong")
    memory = predicted.memory.total
    print(
        f"{case:44} {seconds * 1e3:9.2f} {predicted.step_time * 1e3:9.2f} {error:+7.1%}   "
        f"{peak / 2**30:9.2f} {memory / 2**30:9.2f} {memory / peak - 1:+7.1%}   {mfu or 0:5.1%}",
        flush=True,
    )
    return error


if __name__ == "__main__":
    main()
