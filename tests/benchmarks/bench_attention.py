"""Times every block-sparse attention backend on a GPU, after checking that each is right.

    PYTHONPATH=. python tests/benchmarks/bench_attention.py --out results --seconds 500
    PYTHONPATH=. python tests/benchmarks/bench_attention.py --cases 16384/128 --patterns window --backends triton,flex
    PYTHONPATH=. python tests/benchmarks/bench_attention.py --gate                    # the check alone, more shapes
    PYTHONPATH=. python tests/benchmarks/bench_attention.py --tune forward --cases 4096/128,16384/128

Rates count the visited 128×128 blocks: 4·b·h·d·n²·density forward, 2.5 times that backward. Two ceilings stand beside
them: the time to move q, k, v and the output once, and a dense call of the same work (every query against as many keys
as a row of the pattern has on average). Backends take turns; medians over the rounds. Writes attention.json and prints
a table.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.kernels import fa4, layouts, reference, triton_backward, triton_forward, triton_op
from workbench.kernels.attention import block_sparse_attention
from workbench.kernels.gate import NAMES, Gate, passes, relative_errors
from workbench.kernels.layout import BlockLayout
from workbench.kernels.triton_common import CONFIGS, Tile, padded_head_dim

SHAPES = {4096: (8, 16), 16384: (2, 16), 65536: (1, 8)}  # tokens: (batch, heads)
CASES = "4096/64,4096/128,16384/64,16384/128,65536/128"
PATTERNS: dict[str, Callable[[int], BlockLayout]] = {
    "dense": layouts.full,
    "strided": layouts.strided,
    "window": layouts.window_global,
}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def backends(names: list[str], layout: BlockLayout) -> dict[str, Attend]:
    """The functions to time, by name; those that cannot compute this layout are left out."""
    found: dict[str, Attend] = {}
    for name in names:
        if name == "cudnn":
            if layout.is_full:
                found[name] = cudnn
        elif name.startswith("triton"):
            found[name] = triton(layout, name)
        elif name != "fa4" or (fa4.is_installed() and fa4.supports(layout, 128)):
            found[name] = lambda q, k, v, name=name: block_sparse_attention(q, k, v, layout, backend=name)
    return found


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def triton(layout: BlockLayout, variant: str) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        select(variant)
        return block_sparse_attention(q, k, v, layout, backend="triton")

    attend.variant = variant  # type: ignore[attr-defined]
    return attend


def select(variant: str) -> None:
    """Which of our kernels the triton backend runs: the portable ones, or those lowered for Hopper where they can."""
    triton_op.USE_LOWERED = variant == "triton-hopper"


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v that want gradients, and an output gradient."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v, grad = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in range(4))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


# ---- the gate


def gate_cases(thorough: bool) -> Iterator[tuple[str, BlockLayout, int, torch.dtype]]:
    """Short: what is then timed. Thorough: every head_dim, both dtypes and the awkward patterns."""
    window = layouts.window_global(16384)
    for d in (64, 128):
        yield "window 16k", window, d, torch.bfloat16
    yield "strided ragged", layouts.strided(4001), 64, torch.float16
    if not thorough:
        return
    per_head = BlockLayout.per_head([layouts.local(2000, 64, radius=r) for r in (1, 4)])
    empty = BlockLayout.from_pairs(1000, 128, [0, 2, 5], [1, 1, 3])
    for d, dtype in itertools.product((32, 40, 64, 72, 80, 96, 128), (torch.float16, torch.bfloat16)):
        yield "window blocks of 64", layouts.window_global(2048, 64), d, dtype
        yield "strided blocks of 128", layouts.strided(2048), d, dtype
        yield "causal ragged", layouts.causal(1500), d, dtype
        yield "per head ragged", per_head, d, dtype
        yield "empty rows and columns", empty, d, dtype
    for d in (64, 128):
        mixed = BlockLayout.per_head([layouts.local(2048), layouts.window_global(2048), layouts.random(2048)])
        yield "per head", mixed, d, torch.bfloat16
        yield "empty rows and columns", BlockLayout.from_pairs(1024, 128, [0, 2, 5], [1, 1, 3]), d, torch.float16
    yield "window 64k", layouts.window_global(65536), 128, torch.bfloat16
    yield "strided 64k", layouts.strided(65536), 64, torch.bfloat16


def gate(names: list[str], thorough: bool) -> list[dict[str, Any]]:
    """Relative errors against float64 over live blocks, each next to dense attention's own in the same dtype."""
    results = []
    for label, layout, d, dtype in gate_cases(thorough):
        heads = layout.heads or 2
        tensors = inputs((1, heads, layout.n, d), dtype, seed=layout.n + d)
        exact = passes(lambda q, k, v, lay=layout: reference.attend(q, k, v, lay, q.shape[-1] ** -0.5)[0],
                       [x.detach().double() for x in tensors])  # fmt: skip
        dense = dict.fromkeys(NAMES, 1.5e-3 if dtype == torch.float16 else 6e-3)
        if layout.n <= 4096:
            dense = relative_errors(passes(backends(["dense"], layout)["dense"], tensors), exact)
        for name, attend in backends([n for n in names if n.startswith("triton")], layout).items():
            found = Gate(relative_errors(passes(attend, tensors), exact), dense, dict.fromkeys(NAMES, 0.0))
            results.append({
                "case": label, "head_dim": d, "dtype": str(dtype), "backend": name, "passed": found.passed,
                "errors": found.errors, "dense": found.dense,
            })  # fmt: skip
            if not found.passed or not thorough:
                print(("passed " if found.passed else "FAILED ") + json.dumps(results[-1]), flush=True)
        del exact, tensors
    failed = sum(not r["passed"] for r in results)
    print(f"gate: {len(results) - failed} of {len(results)} passed", flush=True)
    return results


# ---- timing


def medians(runs: dict[str, Callable[[], Any]], seconds: float, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of each, taking turns; each turn is long enough to hide what the host does between calls."""
    repeats = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        repeats[name] = max(1, round(8 / max(elapsed(run, 2), 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.monotonic() + seconds
    for i in range(rounds):
        for name, run in runs.items():
            times[name].append(elapsed(run, repeats[name]))
        if i >= 4 and time.monotonic() > deadline:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds a call, by device events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def both_passes(
    functions: dict[str, Attend], tensors: list[torch.Tensor], seconds: float
) -> dict[str, dict[str, float]]:
    """Milliseconds of the forward and backward passes alone, by backend. What cannot run says why and drops out."""
    q, k, v, grad = tensors
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    for name, attend in functions.items():
        try:
            out = attend(q, k, v)
            torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
            torch.cuda.synchronize()
        except Exception as error:  # a peer that fails is a line of the result, not the end of the run
            print(f"  {name} failed: {str(error).splitlines()[0][:200] if str(error) else type(error)}", flush=True)
            continue
        forward[name] = lambda attend=attend: attend(q.detach(), k.detach(), v.detach())

        def run(out: torch.Tensor = out, attend: Attend = attend) -> None:
            select(getattr(attend, "variant", ""))
            torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        backward[name] = run
    with torch.no_grad():
        ahead = medians(forward, seconds / 2)
    back = medians(backward, seconds / 2)
    return {name: {"forward": ahead[name], "backward": back[name]} for name in ahead}


def ceilings(layout: BlockLayout, tensors: list[torch.Tensor], copy_rate: float, seconds: float) -> dict[str, Any]:
    """Milliseconds of moving the data once, and of a dense call of the same work."""
    q, k, v, grad = tensors
    size = q.numel() * q.element_size()
    keys = max(128, round(layout.density * layout.num_blocks) * layout.block_size)
    short = [
        q,
        k[:, :, :keys].detach().contiguous().requires_grad_(),
        v[:, :, :keys].detach().contiguous().requires_grad_(),
    ]
    dense = both_passes({"same work": cudnn}, [*short, grad], seconds).get("same work", {})
    # Forward reads q, k, v and writes the output; backward reads those four and the gradient, and writes three.
    return {
        "hbm": {"forward": 4 * size / copy_rate * 1e3, "backward": 8 * size / copy_rate * 1e3},
        "dense_same_work": dense,
    }


def copy_rate() -> float:
    """Bytes read and written per second by a device-to-device copy of 4 GiB."""
    source = torch.randint(2**31, (2**30,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    ms = medians({"copy": lambda: target.copy_(source)}, 5)["copy"]
    return 2 * source.numel() * 4 / ms * 1e3


def measure(arguments: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s", flush=True)
    wanted = [(case, p) for case in arguments.cases.split(",") for p in arguments.patterns.split(",")]
    results = []
    for index, (case, pattern) in enumerate(wanted):
        left = deadline - time.monotonic()
        if left < 5:
            print(f"out of time before {case} {pattern}", flush=True)
            continue
        n, d = map(int, case.split("/"))
        batch, heads = SHAPES[n]
        layout = PATTERNS[pattern](n)
        tensors = inputs((batch, heads, n, d))
        seconds = left / (len(wanted) - index) / 2
        times = both_passes(backends(arguments.backends.split(","), layout), tensors, seconds)
        bounds = ceilings(layout, tensors, rate, seconds / 4)
        rows = {"forward": layout.flops(batch, heads, d), "backward": layout.flops(batch, heads, d, backward=True)}
        rates = {name: {p: rows[p] / ms[p] / 1e9 for p in rows} for name, ms in times.items()}
        results.append({
            "device": torch.cuda.get_device_name(), "n": n, "batch": batch, "heads": heads, "head_dim": d,
            "dtype": "bfloat16", "pattern": pattern, "density": layout.density, "milliseconds": times,
            "tflops": rates, "ceilings_milliseconds": bounds,
            "ceilings_tflops": {p: {k: rows[p] / b[p] / 1e9 for k, b in bounds.items() if p in b} for p in rows},
        })  # fmt: skip
        print(line(results[-1]), flush=True)
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
    return results


def line(r: dict[str, Any]) -> str:
    shown = "  ".join(f"{name} {x['forward']:.0f}/{x['backward']:.0f}" for name, x in r["tflops"].items())
    top = " ".join(f"{p} " + ",".join(f"{k} {v:.0f}" for k, v in b.items()) for p, b in r["ceilings_tflops"].items())
    return f"{r['n']:6} d={r['head_dim']:<4}{r['pattern']:8} ({r['density']:.3f})  {shown}   [ceilings: {top}]"


# ---- sweeps


def candidates(kernel: str) -> list[Tile]:
    """Tiles worth trying; what does not fit in shared memory or registers shows as failed or slow."""
    sides = {
        "forward": [(128, 128), (128, 64), (64, 128), (64, 64)],
        "dq": [(128, 128), (128, 64), (128, 32), (64, 128), (64, 64)],
        "dkdv": [(128, 128), (64, 128), (32, 128), (128, 64), (64, 64)],
    }
    return [Tile(m, n, w, s) for (m, n), w, s in itertools.product(sides[kernel], (4, 8), (2, 3, 4))]


def kernel_run(kernel: str, n: int, d: int, layout: BlockLayout) -> tuple[Callable[[], Any], float]:
    """A call of one kernel (and what combines its parts), and the operations it does."""
    scale = d**-0.5
    q, k, v, grad = (x.detach() for x in inputs((*SHAPES[n], n, d)))
    out, lse = triton_forward.forward(q, k, v, layout, scale)
    state = (q, k, v, grad, lse, (out * grad).sum(-1, dtype=torch.float32))
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: triton_forward.forward(q, k, v, layout, scale),
        "dkdv": lambda: triton_backward._column_pass(state, dk, dv, layout, scale),
        "dq": lambda: triton_backward._row_pass(state, dq, layout, scale),
    }
    products = {"forward": 2, "dkdv": 4, "dq": 3}[kernel]
    return runs[kernel], layout.flops(*SHAPES[n], d) / 2 * products


def tune(arguments: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Time one kernel alone for every candidate tile."""
    kernel, results = arguments.tune, []
    for case, pattern in itertools.product(arguments.cases.split(","), arguments.patterns.split(",")):
        n, d = map(int, case.split("/"))
        run, work = kernel_run(kernel, n, d, PATTERNS[pattern](n))
        before, mine = CONFIGS[padded_head_dim(d), 128], []
        for tile in candidates(kernel):
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                break
            CONFIGS[padded_head_dim(d), 128] = replace(before, **{kernel: tile})
            try:
                ms = medians({"it": run}, 1, rounds=7)["it"]
            except Exception as error:  # does not fit
                print(f"  {tile}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            mine.append({"kernel": kernel, "n": n, "head_dim": d, "pattern": pattern, "tile": str(tile),
                         "milliseconds": ms, "tflops": work / ms / 1e9})  # fmt: skip
        CONFIGS[padded_head_dim(d), 128] = before
        results += mine
        for r in sorted(mine, key=lambda r: r["milliseconds"])[:6]:
            print(f"{kernel} {case} {pattern}: {r['tile']} {r['milliseconds']:.3f} ms {r['tflops']:.0f}", flush=True)
    return results


def main() -> int:
    torch._dynamo.config.recompile_limit = 256  # FlexAttention is compiled anew for every case
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="tokens/head_dim, comma-separated")
    parser.add_argument("--patterns", default="window,strided,dense")
    parser.add_argument("--backends", default="triton,triton-hopper,flex,fa4,cudnn")
    parser.add_argument("--seconds", type=float, default=480, help="stop starting new cases after this")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--gate", action="store_true", help="only the correctness check, thoroughly")
    parser.add_argument("--tune", choices=["forward", "dkdv", "dq"], help="sweep the tiles of one kernel")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    checked = gate(arguments.backends.split(","), arguments.gate)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "gate": checked,
        "options": {name: value for name, value in vars(arguments).items() if name != "out"},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    passed = all(r["passed"] for r in checked)
    if not passed:
        print("the gate failed: nothing is timed", flush=True)
    elif not arguments.gate:
        result["tune" if arguments.tune else "cases"] = (tune if arguments.tune else measure)(arguments, deadline)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attention.json").write_text(json.dumps(result, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
