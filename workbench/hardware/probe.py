"""Measures a device and prints one JSON line: ``python -m workbench.hardware.probe [auto|cpu|cuda|cuda:N]``."""

import os
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from workbench.hardware.facts import NO_DEVICE, DeviceFacts
from workbench.hardware.limits import memory_limit
from workbench.hardware.nvml import Nvml

PEAKS = Path(__file__).with_name("peaks.toml")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(asked: str) -> int:
    there = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    name = {"auto": there[1] if len(there) > 1 else "cpu", "cuda": "cuda:0"}.get(asked, asked)
    if name not in there:
        print("auto, " + ", ".join(there))
        return NO_DEVICE
    facts = _cpu() if name == "cpu" else _cuda(torch.device(name))
    print(facts.model_dump_json())
    return 0


def _cpu() -> DeviceFacts:
    peaks = {name: _product_rate(dtype, 512, "cpu") for name, dtype in DTYPES.items()}
    copied = _copy_rate("cpu", 2**26)
    return DeviceFacts(
        device="cpu",
        kind="cpu",
        name=_cpu_name(),
        memory_bytes=memory_limit(),
        peak_flops=peaks,
        peak_source="measured matmul",
        memory_bandwidth=copied,
        bandwidth_source="measured copy",
        matmul_flops={name: _linear_rate(dtype, 256, "cpu") for name, dtype in DTYPES.items()},
        attention_flops={name: _attention_rate(dtype, 2, "cpu") for name, dtype in DTYPES.items()},
        copy_bandwidth=copied,
        op_overhead_s=_op_overhead("cpu"),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
    )


def _cuda(device: torch.device) -> DeviceFacts:
    name = torch.cuda.get_device_name(device)
    entry = datasheet(name)
    sheet = {k: entry[k] * 1e12 for k in PRECISIONS if k in entry} if entry else None
    peaks = sheet or {k: _product_rate(dtype, 8192, device) for k, dtype in DTYPES.items()}
    rates = {k: _linear_rate(dtype, 8192, device) for k, dtype in DTYPES.items()}
    attention = {k: _attention_rate(dtype, 512, device) for k, dtype in DTYPES.items()}
    if torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 0):
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32"] = _linear_rate(torch.float32, 8192, device)
    copied = _copy_rate(device, 2**30)
    nvml = Nvml(device)
    return DeviceFacts(
        device=str(device),
        kind="cuda",
        name=name,
        count=torch.cuda.device_count(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        peak_flops=peaks,
        peak_source="datasheet" if entry else "measured matmul",
        memory_bandwidth=entry["bandwidth"] * 1e9 if entry else copied,
        bandwidth_source="datasheet" if entry else "measured copy",
        matmul_flops=rates,
        attention_flops=attention,
        copy_bandwidth=copied,
        op_overhead_s=_op_overhead(device),
        power_cap_watts=nvml.power_cap_watts(),
        torch_version=torch.__version__,
        driver=nvml.driver(),
        threads=torch.get_num_threads(),
    )


def datasheet(name: str) -> dict[str, Any] | None:
    """The vendor's rates, TFLOP/s and GB/s, of the first entry all of whose words are in the device's name."""
    entries = tomllib.loads(PEAKS.read_text())["gpu"]
    return next((e for e in entries if all(word in name for word in e["name"].split())), None)


def _seconds(run: Callable[[], object], device: torch.device | str, at_least_s: float = 0.3) -> float:
    """Best seconds of one call, over as many as fit in ``at_least_s`` and three at least: a ceiling is what load cannot raise."""
    sync = torch.cuda.synchronize if str(device) != "cpu" else lambda: None
    run()
    sync()
    times: list[float] = []
    end = time.perf_counter() + at_least_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        sync()
        times.append(time.perf_counter() - start)
    return min(times)


def _product_rate(dtype: torch.dtype, n: int, device: torch.device | str) -> float:
    """Achieved FLOP/s of one n × n product; on random values, since zeros can run faster. What no step exceeds.

    A linear layer and not ``a @ b``: on CPUs without half-precision units the two take different paths, 10× apart.
    """
    x, weight = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: F.linear(x, weight), device)


def _linear_rate(dtype: torch.dtype, n: int, device: torch.device | str) -> float:
    """Achieved FLOP/s of an n × n linear layer over n rows, forward and backward: what a training step can hope for.

    The weight gradient's product reads both factors across, and is slower: in TF32 it takes up to twice the forward's time.
    """
    x, weight = (torch.randn(n, n, device=device).to(dtype).requires_grad_() for _ in range(2))
    gradient = torch.randn(n, n, device=device).to(dtype)

    def both() -> None:
        torch.autograd.grad(F.linear(x, weight), (x, weight), gradient)

    return 6 * n**3 / _seconds(both, device)


def _attention_rate(dtype: torch.dtype, heads: int, device: torch.device | str, n: int = 256, width: int = 64) -> float:
    """Achieved FLOP/s of fused attention, its two products forward and five backward."""
    q, k, v = (torch.randn(1, heads, n, width, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, heads, n, width, device=device).to(dtype)

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), gradient)

    return 7 * 2 * heads * n * n * width / _seconds(both, device)


def _copy_rate(device: torch.device | str, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _op_overhead(device: torch.device | str) -> float:
    x = torch.ones(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            x.add(1)

    return _seconds(hundred, device) / 100


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "auto"))
