"""The child process of ``dtypes``: prints what it saw on the device that its argument names, as one line of JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.experiment.dtypes import CUDA_AUTOCAST, DtypesSeen, Way
from workbench.models.build import build_model
from workbench.trainer.loop import resolve_device
from workbench.trainer.module_precision import apply_precision, dtype_report

HALF = torch.float16
RULES = {"*.attn": "fp32"}


def probe(device: torch.device) -> DtypesSeen:
    ways = [
        ("autocast alone", _autocast_alone),
        ("module.to(float32) inside autocast", _converted_inside),
        ('precision_rules={"*.attn": "fp32"}', _by_rule),
    ]
    seen = [_way(name, forward, device) for name, forward in ways]
    return DtypesSeen(str(device), _name(HALF), seen, operator_dtypes(device))


def _way(name: str, forward: Callable[[nn.Module, Tensor], Any], device: torch.device) -> Way:
    model = build_model("vit-nano", num_classes=10, image_size=16, in_channels=3).to(device)
    rows = dtype_report(model, torch.randn(2, 3, 16, 16, device=device), RULES, forward)
    operators: dict[str, set[str]] = {}
    for row in rows:
        for operator, counts in row.operators.items():
            operators.setdefault(operator, set()).update(counts)
    return Way(name, {op: sorted(dtypes) for op, dtypes in operators.items()}, all(row.holds for row in rows))


def _autocast_alone(model: nn.Module, images_BCHW: Tensor) -> None:
    with torch.autocast(images_BCHW.device.type, dtype=HALF):
        model(images_BCHW)


def _converted_inside(model: nn.Module, images_BCHW: Tensor) -> None:
    with torch.autocast(images_BCHW.device.type, dtype=HALF):
        for name, module in model.named_modules():
            if name.endswith(".attn"):
                module.to(torch.float32)
        model(images_BCHW)


def _by_rule(model: nn.Module, images_BCHW: Tensor) -> None:
    apply_precision(model, RULES, images_BCHW.device.type)
    _autocast_alone(model, images_BCHW)


def operator_dtypes(device: torch.device) -> dict[str, str]:
    """The dtype that each operator of ``CUDA_AUTOCAST`` gives inside a half-precision region, for half inputs."""
    x_NI = torch.randn(4, 8, device=device, dtype=HALF)
    image_BCHW, kernel_OCHW = x_NI.view(1, 2, 4, 4), torch.randn(2, 2, 3, 3, device=device)
    weight_OI, labels_N = torch.randn(8, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: F.linear(x_NI, weight_OI),
        "matmul": lambda: x_NI @ weight_OI,
        "conv2d": lambda: F.conv2d(image_BCHW, kernel_OCHW, padding=1),
        "softmax": lambda: x_NI.softmax(-1),
        "log_softmax": lambda: x_NI.log_softmax(-1),
        "layer_norm": lambda: F.layer_norm(x_NI, (8,), weight_OI[0], weight_OI[1]),
        "sum": lambda: x_NI.sum(),
        "exp": lambda: x_NI.exp(),
        "pow": lambda: x_NI.pow(2),
        "nll_loss": lambda: F.nll_loss(x_NI, labels_N),
        "gelu": lambda: F.gelu(x_NI),
    }
    assert set(calls) == set(CUDA_AUTOCAST)
    with torch.autocast(device.type, dtype=HALF):
        return {name: _name(call().dtype) for name, call in calls.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    print(json.dumps(asdict(probe(resolve_device(sys.argv[1])))))
