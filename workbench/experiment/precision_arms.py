"""The arms of the precision stage, and why one of them cannot run on a device."""

from typing import Any

from workbench.errors import Refused, nearest
from workbench.experiment.ablation import Arm
from workbench.hardware.facts import DeviceFacts


def _fp16(mode: str, **constants: Any) -> dict[str, Any]:
    return {"precision": "fp16", "loss_scaling": {"mode": mode, **constants}}


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16, no scaling": _fp16("none"),
    "fp16, static scale": _fp16("static"),
    "fp16, dynamic scale": _fp16("dynamic"),
    "fp16, dynamic scale, interval 100": _fp16("dynamic", interval=100),
    "fp16, fp32 attention": {**_fp16("dynamic"), "precision_rules": {"*.attn": "fp32"}},
    "fp8": {"precision": "fp8"},
}
"""Every arm in full, so that no arm depends on what the workload says."""


def precision_arms(names: list[str], facts: DeviceFacts) -> list[Arm]:
    """Arms by name, in the order given; one that the device cannot run says why and is reported, not started.

    Raises:
        Refused: an unknown name, or fewer than two.
    """
    for name in names:
        if name not in SETTINGS:
            raise Refused("precision arm", name, fix=nearest(name, SETTINGS))
    if len(names) < 2:
        raise Refused("precision arms", names, allowed="two or more, the first of which is the baseline")
    return [Arm(name=n, settings=SETTINGS[n], unavailable=_unavailable(SETTINGS[n]["precision"], facts)) for n in names]


def _unavailable(precision: str, facts: DeviceFacts) -> str:
    if precision == "tf32" and facts.kind != "cuda":
        return "TF32 is a mode of NVIDIA matrix units; this device has none"
    if precision == "fp8" and "fp8" not in facts.peak_flops:
        return f"no fp8 rate is known for {facts.name}; fp8 needs NVIDIA compute capability 8.9 or newer"
    return ""
