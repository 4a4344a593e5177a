"""Formulas against what PyTorch counts and keeps."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.hardware.facts import DeviceFacts
from workbench.models.build import build_model
from workbench.models.config import VitConfig, vit_config
from workbench.planner.memory import memory_ledger
from workbench.planner.operators import forward_flops, model_flops
from workbench.planner.predict import predict_step, utilisation

FACTS = DeviceFacts(
    device="cpu",
    kind="cpu",
    name="made up",
    memory_bytes=10**9,
    peak_flops={"fp32": 1e11, "bf16": 4e11},
    peak_source="measured matmul",
    memory_bandwidth=1e10,
    bandwidth_source="measured copy",
    op_overhead_s=1e-6,
    torch_version="0",
)


def built(**fields: object) -> tuple[torch.nn.Module, VitConfig]:
    model = build_model("vit-micro", num_classes=10, image_size=32, in_channels=3, **fields)
    return model, model.config  # type: ignore[return-value]


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "registers": 3}])
def test_flops_are_those_that_pytorch_counts(fields: dict[str, object]) -> None:
    """With eager attention, for PyTorch's counter gives 0 for fused attention on a CPU."""
    model, vit = built(attention="eager", **fields)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randn(4, 3, 32, 32)).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward_flops(vit, 4) == forward.get_total_flops()
    assert model_flops(vit, 4) == forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_bytes_are_those_that_autograd_keeps(attention: str, precision: str) -> None:
    model, vit = built(attention=attention)
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    images = torch.randn(8, 3, 32, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = model(images).sum()
    measured = sum(kept.values())
    loss.backward()
    ledger = memory_ledger(vit, batch=8, precision=precision)
    assert ledger.activations + ledger.casts == pytest.approx(measured, rel=0.15)


def test_states_are_sixteen_bytes_a_parameter() -> None:
    vit = vit_config("vit-10b")
    ledger = memory_ledger(vit, batch=1)
    assert ledger.states / 16 == pytest.approx(10.08e9, rel=0.01)


def test_more_work_never_takes_less_time() -> None:
    vit = vit_config("vit-s")
    times = [predict_step(vit, batch=b, facts=FACTS).step_time for b in (1, 2, 8, 64)]
    assert times == sorted(times)
    assert predict_step(vit, batch=64, micro_batch=8, facts=FACTS).step_time > times[-1]


def test_an_uneven_last_micro_batch_is_counted() -> None:
    vit = vit_config("vit-nano", image_size=32)
    step = predict_step(vit, batch=10, micro_batch=4, facts=FACTS)
    assert step.step_time < predict_step(vit, batch=12, micro_batch=4, facts=FACTS).step_time
    assert step.flops == model_flops(vit, 10)


def test_utilisation_is_of_the_named_dtype_and_unknown_where_its_peak_is() -> None:
    vit = vit_config("vit-s")
    fp32, bf16 = (utilisation(vit, 10.0, FACTS, p) for p in ("fp32", "bf16"))
    assert fp32 is not None and bf16 is not None
    assert fp32 == pytest.approx(4 * bf16)
    assert utilisation(vit, 10.0, FACTS, "fp16") is None


@pytest.mark.parametrize(
    "module",
    ["planner.predict", "records.query", "batch", "experiment", "models.config", "data.sources", "hardware.facts"],
)
def test_rooms_that_only_reason_load_no_torch(module: str) -> None:
    code = f"import sys, workbench.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
