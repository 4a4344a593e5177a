"""Predictions against steps measured on one H200, from the rates that its kernels were measured to reach.

The efficiencies of ``planner.roofline`` come from single kernels on the same machine, so this shows whether the parts add up to a
step, and keeps them so; it does not show how the planner does on another device. The facts' matrix rates are of a linear layer's
three products; attention was not measured by itself and takes the constant's rate.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest

from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VitConfig, vit_config
from workbench.planner.predict import StepPrediction, predict_step

DATA = Path(__file__).parents[1] / "data"
FACTS = DeviceFacts.model_validate_json((DATA / "h200_facts.json").read_bytes())
ROWS = list(csv.DictReader((DATA / "h200_steps.csv").open()))


def predicted(case: str) -> StepPrediction:
    """Of ``model:batch:precision[:field=value]…``, as ``bench_planner.py`` names cases."""
    model, batch, precision, *fields = case.split(":")
    shape: dict[str, Any] = {}
    step: dict[str, Any] = {}
    for name, text in (field.split("=") for field in fields):
        value = int(text) if text.isdigit() else {"true": True}.get(text, text)
        (shape if name in VitConfig.model_fields else step)[name] = value
    return predict_step(vit_config(model, **shape), batch=int(batch), precision=precision, facts=FACTS, **step)


def test_step_times_are_near_those_measured() -> None:
    errors = {r["case"]: predicted(r["case"]).step_time * 1e3 / float(r["step_ms"]) - 1 for r in ROWS}
    print("\n".join(f"{case:42} {error:+.1%}" for case, error in errors.items()))
    assert statistics.fmean(map(abs, errors.values())) < 0.13
    assert max(map(abs, errors.values())) < 0.3


@pytest.mark.parametrize("row", [r for r in ROWS if float(r["peak_gib"]) > 1], ids=lambda r: r["case"])
def test_the_peak_of_memory_is_within_three_percent(row: dict[str, str]) -> None:
    """Of what is more than a library's own workspaces."""
    assert predicted(row["case"]).memory.total / 2**30 == pytest.approx(float(row["peak_gib"]), rel=0.03)


def test_fp8_layers_that_quantise_pass_by_pass_are_slower_than_bf16() -> None:
    bf16, fp8 = (predicted(f"vit-l:64:{precision}") for precision in ("bf16", "fp8"))
    assert fp8.step_time > bf16.step_time
    assert fp8.memory.total < bf16.memory.total
