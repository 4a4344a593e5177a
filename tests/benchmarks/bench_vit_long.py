"""A ViT on long sequences, dense flash attention against block-sparse: step time, validation loss, and where it pays.

    PYTHONPATH=. python tests/benchmarks/bench_vit_long.py --out vit_long.json            # one GPU, about 4 minutes
    PYTHONPATH=. python tests/benchmarks/bench_vit_long.py --smoke --out vit_long.json    # a CPU, a minute; says nothing

The task: an image of square regions, each filled with one of eight gratings that differ in direction alone, under noise
so strong that one patch does not tell them apart; every patch is to be classified. Its neighbours help, distant patches
do not, so a local pattern has all it needs. Images are drawn on the device. Patches lie in 2-D tiles (`tile_order`), so
that the sparse arm's window is two-dimensional and its blocks whole. Dense attention has to learn which patches are
near, the window is told: its loss may well be the lower one, so beside equivalence stands "no worse". Three arms:

    dense    scaled_dot_product_attention (a flash kernel)
    sparse   block_sparse_attention over grid_2d
    none     attention returns v: the control that shows what attention is worth on this task

Step times are those of training steps taken in turn, A B B A, medians of paired ratios with an interval; losses are on
images that no arm was trained on, paired by seed.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.experiment.statistics import equivalence, log_ratio_interval
from workbench.kernels import gate, layouts
from workbench.kernels.adapters import layout_attention
from workbench.models.attention import AttentionFunction, sdpa
from workbench.models.config import VitConfig, vit_config
from workbench.models.vit import Block
from workbench.trainer.config import TrainConfig
from workbench.trainer.optim import learning_rate, make_optimizer

CLASSES, PATCH, REGION, WAVELENGTH = 8, 16, 128, 24.0  # pixels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "triton" if DEVICE == "cuda" else "auto"  # our kernels, where another might be faster


class Images:
    """Square images (B, 1, S, S) with a label per patch (B, N), in the order of the tokens; drawn from a seed."""

    def __init__(self, side: int, order: Tensor, noise: float, seed: int) -> None:
        self.side, self.order, self.noise = side, order, noise
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        angles = torch.arange(CLASSES, device=DEVICE) * (math.pi / CLASSES)
        self.waves = 2 * math.pi / WAVELENGTH * torch.stack([angles.cos(), angles.sin()])
        self.pixels = torch.arange(side, device=DEVICE)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        regions = -(-self.side // REGION) + 1
        classes = torch.randint(CLASSES, (size, regions, regions), generator=self.generator, device=DEVICE)
        phases = 2 * math.pi * torch.rand(size, regions, regions, generator=self.generator, device=DEVICE)
        # A shift by whole patches: a patch has one label, and regions do not line up with blocks.
        shift = PATCH * torch.randint(REGION // PATCH, (2,), generator=self.generator, device=DEVICE)
        rows, cols = ((self.pixels + s) // REGION for s in shift)
        of_pixel = classes[:, rows][:, :, cols]
        travel = self.waves[0][of_pixel] * self.pixels + self.waves[1][of_pixel] * self.pixels[:, None]
        images = torch.sin(travel + phases[:, rows][:, :, cols])
        images += self.noise * torch.randn(images.shape, generator=self.generator, device=DEVICE)
        images /= math.sqrt(0.5 + self.noise**2)
        labels = of_pixel[:, ::PATCH, ::PATCH].flatten(1)
        return images[:, None], labels[:, self.order]


class PatchClassifier(nn.Module):
    """The package's ViT blocks over patches in tile order, with fixed 2-D sine positions and a head on every token."""

    def __init__(self, config: VitConfig, attention: AttentionFunction, order: Tensor) -> None:
        super().__init__()
        self.order = order
        self.patch_embed = nn.Conv2d(config.in_channels, config.width, config.patch_size, config.patch_size)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        self.register_buffer("positions", sine_positions(math.isqrt(config.num_patches), config.width)[order.cpu()])

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)[:, self.order] + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sine_positions(side: int, width: int) -> Tensor:
    """(side², width): sines and cosines of row and column at wavelengths from 4 to 400 patches."""
    rates = 2 * math.pi / torch.logspace(math.log10(4), math.log10(400), width // 4)
    waves = torch.arange(side)[:, None] * rates
    line = torch.cat([waves.sin(), waves.cos()], dim=1)  # (side, width / 2)
    grid = [line[:, None].expand(side, side, -1), line[None].expand(side, side, -1)]
    return torch.cat(grid, dim=-1).flatten(0, 1)


class Arm:
    """One model in training. Arms of one seed start from equal weights and see equal images."""

    def __init__(self, name: str, options: argparse.Namespace, side: int, seed: int, steps: int) -> None:
        self.name, self.options = name, options
        grid = side // PATCH
        order = torch.from_numpy(layouts.tile_order(grid, grid, options.block)).to(DEVICE)
        config = vit_config(
            "vit-s", width=options.width, mlp_width=4 * options.width, heads=options.width // options.head_dim,
            depth=options.depth, patch_size=PATCH, image_size=side, in_channels=1, num_classes=CLASSES,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.model = PatchClassifier(config, attention(name, grid, options), order).to(DEVICE)
        self.images = Images(side, order, options.noise, seed + 1)
        self.config = TrainConfig(learning_rate=options.learning_rate, warmup_steps=max(steps // 10, 1), steps=steps,
                                  precision="bf16", fused_optimizer=DEVICE == "cuda")  # fmt: skip
        self.optimizer = make_optimizer(self.model, self.config)
        self.taken = 0

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = self.model(images)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, min(self.taken, self.config.steps))
        self.loss(*self.images.batch(self.options.batch)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1

    @torch.no_grad()
    def validate(self, batches: int) -> float:
        held_out = Images(self.images.side, self.images.order, self.options.noise, seed=10**6)
        return sum(float(self.loss(*held_out.batch(self.options.batch))) for _ in range(batches)) / batches


def attention(name: str, grid: int, options: argparse.Namespace) -> AttentionFunction:
    if name == "dense":
        return sdpa
    if name == "none":
        return lambda q, k, v: v
    layout = layouts.grid_2d(grid * grid, options.block, height=grid, width=grid, radius=options.radius)
    return layout_attention(layout, BACKEND)


def checked(options: argparse.Namespace) -> dict[str, Any]:
    """The gate, on the sparse arm's own pattern at a length at which float64 is affordable."""
    grid = 64 if DEVICE == "cuda" else 16
    layout = layouts.grid_2d(grid * grid, options.block, height=grid, width=grid, radius=options.radius)
    dtype = torch.bfloat16
    tensors = [torch.randn(1, 2, layout.n, options.head_dim, device=DEVICE, dtype=dtype) for _ in range(4)]
    found = gate.check(layout_attention(layout, BACKEND), layout, tensors)
    print(f"gate at {layout.n} tokens, backend {BACKEND}: {found}", flush=True)
    return {"passed": found.passed, "errors": found.errors, "dense": found.dense, "tokens": layout.n}


# ---- step time


def timed(arm: Arm, steps: int) -> float:
    """Seconds of one step, by the mean over ``steps``."""
    synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        arm.step()
    synchronize()
    return (time.perf_counter() - began) / steps


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def step_times(side: int, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Dense against sparse at one length, in turns."""
    arms = [Arm(name, options, side, seed=0, steps=1000) for name in ("dense", "sparse")]
    for arm in arms:
        timed(arm, 3)
    peaks = {arm.name: peak_bytes(arm) for arm in arms}
    block = max(1, math.ceil(0.1 / timed(arms[0], 1)))
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    deadline = time.monotonic() + seconds
    while len(times["dense"]) < 5 or (time.monotonic() < deadline and len(times["dense"]) < 24):
        for arm in arms if len(times["dense"]) % 2 else arms[::-1]:
            times[arm.name].append(timed(arm, block))
    ratios = np.log(times["dense"]) - np.log(times["sparse"])
    interval = log_ratio_interval(ratios, 0.95)
    layout = layouts.grid_2d((side // PATCH) ** 2, options.block, height=side // PATCH, width=side // PATCH,
                             radius=options.radius)  # fmt: skip
    return {
        "tokens": (side // PATCH) ** 2, "side": side, "density": layout.density, "rounds": len(ratios),
        "median_step_seconds": {name: float(np.median(t)) for name, t in times.items()}, "peak_bytes": peaks,
        "ratio": interval.ratio, "low": interval.low, "high": interval.high,
    }  # fmt: skip


def peak_bytes(arm: Arm) -> int | None:
    if DEVICE != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    arm.step()
    return torch.cuda.max_memory_allocated()


# ---- loss


def losses(side: int, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Every arm trained for the same steps from the same seeds; stops between seeds when time is up."""
    found: dict[str, list[float]] = {name: [] for name in ("dense", "sparse", "none")}
    for seed in range(options.seeds):
        began = time.monotonic()
        for name, values in found.items():
            arm = Arm(name, options, side, seed, options.steps)
            for _ in range(options.steps):
                arm.step()
            values.append(arm.validate(options.validation_batches))
        print(f"seed {seed}: " + ", ".join(f"{n} {v[-1]:.4f}" for n, v in found.items()), flush=True)
        if time.monotonic() + (time.monotonic() - began) > deadline:
            break
    scale = float(np.mean(found["dense"]))
    relative = {name: [v / scale for v in values] for name, values in found.items()}
    result: dict[str, Any] = {"tokens": (side // PATCH) ** 2, "losses": found, "steps": options.steps,
                              "margin": options.margin, "chance": math.log(CLASSES)}  # fmt: skip
    for name in ("sparse", "none"):
        test = equivalence(relative[name], relative["dense"], margin=options.margin, confidence=0.95)
        result[name] = test._asdict() | {"not_worse": test.high < options.margin}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--sides", default="512,1024,2048,3072,4096", help="pixels, for step times; whole tiles")
    parser.add_argument("--loss-side", type=int, default=2048)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--radius", type=int, default=4, help="of the window, in patches")
    parser.add_argument("--noise", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--validation-batches", type=int, default=16)
    parser.add_argument("--margin", type=float, default=0.05, help="on the validation loss, relative to dense")
    options = parser.parse_args()
    if options.smoke:
        small = {"sides": "256,512", "loss_side": 256, "width": 64, "head_dim": 32, "depth": 2, "block": 64,
                 "steps": 20, "seeds": 2, "validation_batches": 2, "seconds": 40}  # fmt: skip
        vars(options).update(small)
    deadline = time.monotonic() + options.seconds
    sides = [int(s) for s in options.sides.split(",")]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "torch": torch.__version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "precision": "bf16 autocast",
        "options": {k: v for k, v in vars(options).items() if k != "out"}, "gate": checked(options), "lengths": [],
    }  # fmt: skip
    if not result["gate"]["passed"]:
        print("the gate failed: nothing is timed", flush=True)
        return 1
    for side in sides:
        try:
            r = step_times(side, options, seconds=options.seconds / 20)
        except torch.OutOfMemoryError as error:
            print(f"{side}×{side}: out of memory ({error})"[:200], flush=True)
            continue
        finally:
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        result["lengths"].append(r)
        ms = {name: f"{1e3 * t:.1f} ms" for name, t in r["median_step_seconds"].items()}
        print(f"{r['tokens']:6} tokens, density {r['density']:.3f}: dense {ms['dense']}, sparse {ms['sparse']}, "
              f"{r['ratio']:.2f}× [{r['low']:.2f}, {r['high']:.2f}]", flush=True)  # fmt: skip
    slow = [k for k, r in enumerate(result["lengths"]) if r["low"] <= 1]
    paying = result["lengths"][slow[-1] + 1 if slow else 0 :]
    result["pays_from_tokens"] = paying[0]["tokens"] if paying else None
    print(f"sparse pays from {result['pays_from_tokens']} tokens on", flush=True)
    result["validation"] = found = losses(options.loss_side, options, deadline)
    result["seconds"] = options.seconds - (deadline - time.monotonic())
    for name in ("sparse", "none"):
        print(f"validation loss of {name} against dense, relative: {found[name]['difference']:+.3f} "
              f"[{found[name]['low']:+.3f}, {found[name]['high']:+.3f}], margin ±{options.margin}: "
              f"equivalence {found[name]['state']}, {'' if found[name]['not_worse'] else 'not '}shown to be no worse",
              flush=True)  # fmt: skip
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
