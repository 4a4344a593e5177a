"""What a layout costs to build: every builder at 64k tokens, and the input-adaptive choice beside the attention it serves.

    PYTHONPATH=. python tests/benchmarks/bench_layouts.py --out layouts.json
    PYTHONPATH=. python tests/benchmarks/bench_layouts.py --smoke                 # a CPU, small

A choice costs twice: the selection itself (pooling, scores of blocks, a sort, the CSR on the host), and what the first
attention with a new layout does besides attention (the transpose, the work lists, their copies to the device). Both
are paid once per refresh. On a CPU the reference backend stands in for the kernels.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.kernels import layouts
from workbench.kernels.adaptive import select_blocks
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.gate import passes
from workbench.kernels.layout import BlockLayout

CUDA = torch.cuda.is_available()
SHAPES = {4096: (8, 16), 16384: (2, 16), 65536: (1, 8)}  # tokens: (batch, heads)
BUILDERS: dict[str, Callable[[int], BlockLayout]] = {
    "full": layouts.full, "causal": layouts.causal, "local": layouts.local, "strided": layouts.strided,
    "fixed": layouts.fixed, "window_global": layouts.window_global, "random": layouts.random,
    "grid_2d": lambda n: layouts.grid_2d(n, height=math.isqrt(n), width=math.isqrt(n)),
    "dilated_2d": lambda n: layouts.dilated_2d(n, height=math.isqrt(n), width=math.isqrt(n)),
}  # fmt: skip


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    """Median of ``rounds`` calls, each waited for, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def construction(n: int, rounds: int) -> dict[str, float]:
    return {name: milliseconds(lambda build=build: build(n), rounds) for name, build in BUILDERS.items()}


def adaptive(n: int, batch: int, heads: int, head_dim: int, top_k: int, rounds: int, every: int) -> dict[str, Any]:
    """One length: selection, what a fresh layout adds to its first attention, and the attention itself."""
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    tensors = [torch.randn(batch, heads, n, head_dim, device=device, dtype=dtype) for _ in range(4)]

    def select() -> BlockLayout:
        return select_blocks(tensors[0], tensors[1], top_k=top_k)

    def attend(layout: BlockLayout) -> None:
        backend = "triton" if CUDA else "reference"
        passes(lambda q, k, v: block_sparse_attention(q, k, v, layout, backend=backend), tensors)  # type: ignore[arg-type,return-value]

    layout = select()
    attention = milliseconds(lambda: attend(layout), rounds)
    selection = milliseconds(select, rounds)
    fresh = [select() for _ in range(rounds + 1)]
    first = milliseconds(lambda: attend(fresh.pop()), rounds)
    refresh = selection + max(first - attention, 0)
    return {
        "n": n, "batch": batch, "heads": heads, "head_dim": head_dim, "top_k": top_k, "density": layout.density,
        "attention_ms": attention, "selection_ms": selection, "first_use_ms": max(first - attention, 0),
        "refresh_every": every, "share": refresh / (every * attention),
        "refresh_every_for_5_percent": math.ceil(refresh / (0.05 * attention)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    parser.add_argument("--refresh-every", type=int, default=100, help="calls that one choice serves")
    parser.add_argument("--top-k", type=int, default=8, help="key blocks that a row keeps")
    parser.add_argument("--smoke", action="store_true", help="small shapes, few rounds")
    arguments = parser.parse_args()
    n, rounds = (4096, 2) if arguments.smoke else (65536, 9)
    shapes = {1024: (1, 2)} if arguments.smoke else SHAPES
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "construction": {"n": n, "milliseconds": construction(n, rounds)}, "adaptive": [],
    }  # fmt: skip
    print(f"building a layout of {n} tokens, ms:", flush=True)
    print("  " + "  ".join(f"{k} {ms:.1f}" for k, ms in result["construction"]["milliseconds"].items()), flush=True)
    for tokens, (batch, heads) in shapes.items():
        for head_dim in (64, 128):
            r = adaptive(tokens, batch, heads, head_dim, arguments.top_k, rounds, arguments.refresh_every)
            result["adaptive"].append(r)
            print(
                f"{tokens:6} d={head_dim:<4} attention {r['attention_ms']:.2f} ms, selection {r['selection_ms']:.2f} ms, "
                f"first use {r['first_use_ms']:.2f} ms: {r['share']:.1%} of attention when refreshed every "
                f"{r['refresh_every']} calls; below 5 % from every {r['refresh_every_for_5_percent']}",
                flush=True,
            )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
