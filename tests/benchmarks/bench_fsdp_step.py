"""An FSDP step of ours against a hand-written FSDP2 script, on one device, as a ratio of step times with its interval.

    PYTHONPATH=. python tests/benchmarks/bench_fsdp_step.py --rounds 20 --out tests/benchmarks/results/fsdp_step.json
    PYTHONPATH=. python tests/benchmarks/bench_fsdp_step.py --smoke                # a tiny model, on a CPU

One process is rank 0 of a fake world: collectives return at once and carry nothing, so that the losses mean nothing, while
all else (hooks, copies in and out of the gathered buffers, kernels, optimizer) is that of a real rank. Without the links'
time the host's work has nothing to hide behind, which is the hardest case for a wrapper. Both arms hold their model at the
same time and take turns of ``--steps`` steps, in alternating order; printed is the mean log-ratio of the rounds with its
95 % interval (paired t).
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.models.config import VitConfig, vit_config
from workbench.models.vit import VisionTransformer
from workbench.parallel.collectives import CollectiveSpy
from workbench.parallel.mesh import build_mesh
from workbench.parallel.parallelize import parallelize
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.step import train_step

WORLD = 8
MAX_NORM = 1.0

Step = Callable[[Tensor, Tensor], None]


def handwritten(shape: VitConfig, device: torch.device) -> Step:
    """What one would write from PyTorch's FSDP2 tutorial."""
    mesh = init_device_mesh(device.type, (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(shape, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(shape: VitConfig, device: torch.device) -> Step:
    plan = ParallelPlan(shard=WORLD, param_dtype="bf16", reduce_dtype="fp32")
    mesh = build_mesh(plan, device.type)
    model = parallelize(make_model(shape, device), plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(images: Tensor, labels: Tensor) -> None:
        samples = WORLD * len(labels)
        train_step(
            model, optimizer, [(images, labels)], F.cross_entropy, mesh, global_samples=samples, max_norm=MAX_NORM
        )

    return step


def make_model(shape: VitConfig, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return VisionTransformer(shape)


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    overrides = {"image_size": 32} if options.smoke else {"image_size": 224}
    shape = vit_config(options.model, num_classes=1000, **overrides)
    images = torch.randn(options.batch, 3, shape.image_size, shape.image_size, device=device)
    labels = torch.randint(1000, (options.batch,), device=device)
    steps = {"handwritten": handwritten(shape, device), "ours": ours(shape, device)}

    check_same_work(steps, images, labels)

    def block(arm: str) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(options.steps):
            steps[arm](images, labels)
        synchronize(device)
        return (time.perf_counter() - began) / options.steps

    for arm in steps:
        for _ in range(options.warm_up):
            steps[arm](images, labels)
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for number in range(options.rounds):
        for arm in list(steps) if number % 2 else list(steps)[::-1]:
            times[arm].append(block(arm))
    ratios = [math.log(a / b) for a, b in zip(times["ours"], times["handwritten"], strict=True)]
    mean = statistics.fmean(ratios)
    half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": options.model,
        "parameters": shape_parameters(shape),
        "batch": options.batch,
        "fake_world": WORLD,
        "rounds": options.rounds,
        "steps_per_block": options.steps,
        "median_step_s": {arm: statistics.median(seconds) for arm, seconds in times.items()},
        "ratio": math.exp(mean),
        "ratio_low": math.exp(mean - half),
        "ratio_high": math.exp(mean + half),
        "block_s": times,
    }


def check_same_work(steps: dict[str, Step], images: Tensor, labels: Tensor) -> None:
    """Arms that exchange other bytes, as at another precision, have no ratio. The sums of norms and of losses may differ."""
    moved = {}
    for arm, step in steps.items():
        with CollectiveSpy() as spy:
            step(images, labels)
        calls = [call for call in spy.calls if call.operation in ("all-gather", "reduce-scatter")]
        moved[arm] = {kind: sum(c.bytes for c in calls if c.operation == kind) for kind in {c.operation for c in calls}}
    if moved["ours"] != moved["handwritten"] or not moved["ours"]:
        raise SystemExit(f"the arms do not exchange the same bytes in a step: {moved}")


def shape_parameters(shape: VitConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in VisionTransformer(shape).parameters())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-1b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of one turn")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.model, options.batch, options.rounds, options.steps, options.warm_up = "vit-nano", 2, 3, 1, 1
    device = torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        found = compare(options, device)
    finally:
        dist.destroy_process_group()
    print(
        f"{found['model']} on {found['device']}: ours / hand-written = {found['ratio']:.4f} "
        f"[{found['ratio_low']:.4f}, {found['ratio_high']:.4f}], medians "
        + ", ".join(f"{arm} {1e3 * s:.1f} ms" for arm, s in found["median_step_s"].items())  # type: ignore[attr-defined]
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
