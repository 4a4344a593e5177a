import subprocess
import sys

import pytest

from workbench.errors import Refused
from workbench.hardware.facts import DeviceFacts
from workbench.models.config import vit_config
from workbench.planner.flops import model_flops
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
GPU = FACTS.model_copy(update={"device": "cuda:0", "kind": "cuda", "memory_bandwidth": 1e12, "op_overhead_s": 5e-6})


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


def test_half_precision_gains_nothing_where_its_products_are_no_faster() -> None:
    """What is left of autocast then is its conversions."""
    same = FACTS.model_copy(update={"peak_flops": {"fp32": 1e11, "bf16": 1e11}, "memory_bandwidth": 1e13})
    vit = vit_config("vit-s")
    fp32, bf16 = (predict_step(vit, batch=8, precision=p, facts=same).step_time for p in ("fp32", "bf16"))
    assert bf16 > fp32


def test_half_precision_gains_less_than_the_peaks_promise() -> None:
    vit = vit_config("vit-b")
    fp32, bf16 = (predict_step(vit, batch=64, precision=p, facts=GPU).step_time for p in ("fp32", "bf16"))
    assert 1 < fp32 / bf16 < GPU.peak_flops["bf16"] / GPU.peak_flops["fp32"]


def test_a_gpu_hides_launches_behind_work_and_a_small_model_does_not() -> None:
    slow_host = GPU.model_copy(update={"op_overhead_s": 2 * GPU.op_overhead_s})
    large, small = vit_config("vit-l"), vit_config("vit-nano", image_size=32)
    assert predict_step(large, batch=64, facts=GPU) == predict_step(large, batch=64, facts=slow_host)
    ratio = predict_step(small, batch=1, facts=slow_host).step_time / predict_step(small, batch=1, facts=GPU).step_time
    assert ratio == pytest.approx(2)


def test_a_fused_update_moves_and_holds_less() -> None:
    vit = vit_config("vit-l")
    plain, fused = (predict_step(vit, batch=1, fused_optimizer=fused, facts=GPU) for fused in (False, True))
    assert fused.step_time < plain.step_time
    assert fused.memory.total < plain.memory.total


def test_measured_rates_go_before_datasheets() -> None:
    sheet = GPU.model_copy(update={"peak_source": "datasheet"})
    measured = sheet.model_copy(update={"matmul_flops": {"bf16": 1e11}})
    vit = vit_config("vit-l")
    slow, fast = (predict_step(vit, batch=64, precision="bf16", facts=f).step_time for f in (measured, sheet))
    assert slow > fast
    assert utilisation(vit, 1.0, measured, "bf16") == utilisation(vit, 1.0, sheet, "bf16")


def test_utilisation_is_of_the_named_dtype_and_unknown_where_its_peak_is() -> None:
    vit = vit_config("vit-s")
    fp32, bf16 = (utilisation(vit, 10.0, FACTS, p) for p in ("fp32", "bf16"))
    assert fp32 is not None and bf16 is not None
    assert fp32 == pytest.approx(4 * bf16)
    assert utilisation(vit, 10.0, FACTS, "fp16") is None


@pytest.mark.parametrize(("field", "value"), [("precision", "int8"), ("optimizer", "lion")])
def test_what_has_no_formula_is_refused(field: str, value: str) -> None:
    with pytest.raises(Refused, match=value):
        predict_step(vit_config("vit-s"), batch=1, facts=FACTS, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module",
    ["planner.predict", "records.query", "batch", "experiment", "models.config", "data.sources", "hardware.facts"],
)
def test_rooms_that_only_reason_load_no_torch(module: str) -> None:
    code = f"import sys, workbench.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
