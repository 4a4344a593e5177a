"""Compiles every kernel configuration for a GPU that need not be there, and reads what each thread uses of it.

    python -m workbench.kernels.resources [--arch 90]

A spilled register is a round trip to memory in the innermost loop, so the test suite refuses configurations that
spill more than :data:`SPILL_BOUND` bytes.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from workbench.kernels import gluon_backward, gluon_forward, triton_backward, triton_forward
from workbench.kernels.triton_common import CONFIGS, Tile

SPILL_BOUND = 192  # bytes of stack a thread: numbers of an item kept across its inner loop
TENSORS = {"q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"}
FLOATS = {"scale", "scale_log2"}
INTEGER_TABLES = {"items", "indices", "splits"}


@dataclass(frozen=True)
class Resources:
    """What one thread of a compiled kernel uses, and what one thread block does."""

    kernel: str
    head_dim: int
    block: int
    tile: Tile
    variant: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_kernel(
    kernel: Any, tile: Tile, constants: dict[str, Any], arch: int, tiles: dict[str, int] | None = None
) -> Any:
    """A Triton or Gluon kernel compiled for ``arch``, as a launch on bf16 with aligned tensors and strides would.

    Args:
        tiles: Gluon's tensors that come as descriptors, with their rows per tile.
    """
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in (tiles or {}):
            rows = (tiles or {})[name]
            if name in {"lse", "delta"}:
                layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
                signature[name] = f"tensordesc<fp32[1, {rows}],{layout!r}>"
            else:
                layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
                signature[name] = f"tensordesc<bf16[1, 1, {rows}, {constants['D']}],{layout!r}>"
        elif name in TENSORS:
            signature[name] = "*bf16"
        elif name in INTEGER_TABLES:
            signature[name] = "*i32"
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "*fp32" if name in {"lse", "delta"} or name.startswith("part_") else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or re.search(r"_[bhn]$", name)
    }
    source = (GluonASTSource if tiles else ASTSource)(kernel, signature, constants, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def usage(compiled: Any) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread, from the disassembler that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        text = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump printed no resource usage:\n{text}"
    return int(found[1]), int(found[2])


VARIANTS = {"whole": (False, False), "cut": (True, True)}  # (causal, ragged): without and with partial blocks


def portable() -> Iterator[tuple[str, int, int, Tile, str, Callable[[int], Any]]]:
    """(kernel, head_dim, block, tile, variant, compile) of every Triton kernel in every configuration."""
    kernels: tuple[tuple[str, Any], ...] = (
        ("forward", triton_forward.forward_kernel),
        ("dkdv", triton_backward.dkdv_kernel),
        ("dq", triton_backward.dq_kernel),
    )
    for ((d, block), config), (name, kernel), (variant, (causal, ragged)) in itertools.product(
        CONFIGS.items(), kernels, VARIANTS.items()
    ):
        tile: Tile = getattr(config, name)
        constants = {
            "BLOCK": block, "M": tile.rows, "N": tile.cols, "D": d, "D_PAD": d, "PER_HEAD": False, "CAUSAL": causal,
            "RAGGED": ragged, "UPCAST": False,
        }  # fmt: skip
        yield name, d, block, tile, variant, partial(compile_kernel, kernel, tile, constants)


def lowered() -> Iterator[tuple[str, int, int, Tile, str, Callable[[int], Any]]]:
    """The same of the kernels lowered for Hopper."""
    queries, stages = gluon_backward.QUERIES, gluon_backward.STAGES
    for d, keys in gluon_backward.KEYS.items():
        shared = {"D": d, "PER_HEAD": False}
        for name, kernel, constants, tiles in (
            ("forward", gluon_forward.forward_kernel, {"STAGES": 256 // d}, dict.fromkeys("qkv", 128)),
            ("dkdv", gluon_backward.dkdv_kernel, {"STAGES": stages, "QUERIES": queries},
             dict.fromkeys(("q", "grad_out", "lse", "delta"), queries) | dict.fromkeys("kv", 128)),
            ("dq", gluon_backward.dq_kernel, {"STAGES": stages, "KEYS": keys},
             dict.fromkeys(("q", "grad_out"), 128) | dict.fromkeys("kv", keys)),
        ):  # fmt: skip
            tile = Tile(128, 128, 4, constants["STAGES"])
            yield name, d, 128, tile, "lowered", partial(compile_kernel, kernel, tile, shared | constants, tiles=tiles)


def report(
    arch: int = 90,
    blocks: Collection[int] = (64, 128),
    head_dims: Collection[int] = (32, 64, 128),
    variants: Collection[str] = (*VARIANTS, "lowered"),
) -> Iterator[Resources]:
    """Compile every configuration, or those asked for, and say what each uses."""
    for name, d, block, tile, variant, compile_for in itertools.chain(portable(), lowered() if arch == 90 else ()):
        if block not in blocks or d not in head_dims or variant not in variants:
            continue
        compiled = compile_for(arch)
        registers, spilled = usage(compiled)
        yield Resources(name, d, block, tile, variant, registers, spilled, compiled.metadata.shared)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for Hopper")
    parser.add_argument("--blocks", type=int, nargs="+", default=(64, 128), help="only layouts of these block sizes")
    parser.add_argument("--head-dims", type=int, nargs="+", default=(32, 64, 128), help="only these head_dims")
    parser.add_argument("--variants", nargs="+", default=(*VARIANTS, "lowered"), help="whole, cut, lowered")
    arguments = parser.parse_args(argv)
    worst = 0
    for r in report(arguments.arch, arguments.blocks, arguments.head_dims, arguments.variants):
        print(
            f"{r.kernel:8} d={r.head_dim:<4} block={r.block:<4} {r.tile!s:50} {r.variant:8} {r.registers:4} registers "
            f"{r.spilled_bytes:5} B spilled {r.shared_bytes:7} B shared",
            flush=True,
        )
        worst = max(worst, r.spilled_bytes)
    if worst > SPILL_BOUND:
        print(f"{worst} bytes spilled, more than the bound of {SPILL_BOUND}", file=sys.stderr)
    return int(worst > SPILL_BOUND)


if __name__ == "__main__":
    sys.exit(main())
