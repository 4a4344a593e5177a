"""Made-up findings for the tests of the report: shaped like real ones. No number here was measured."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from workbench.experiment.finding import (
    Anatomy,
    ArmResult,
    Decision,
    Effect,
    Finding,
    GuardVerdict,
    Interval,
    Measurement,
    PredictionCheck,
)

EVIL = "<img src=x onerror=alert(1)>"
STEPS = 80


def sample_finding(name: str = "02_mixed_precision", *, days: int = 0, seed: int = 0, **changes: Any) -> Finding:
    """A finding with four arms that ran, one that ran out of memory and one that cannot run here."""
    rng = np.random.default_rng(seed)
    ratios = {"fp32": 1.0, "bf16": 1.62, "fp16, no scaling": 1.55, "fp16, dynamic scaling": 1.01}
    blocks = {arm: 0.312 / ratio * np.exp(rng.normal(0, 0.05, 16)) for arm, ratio in ratios.items()}
    arms = [_arm(arm, times, rng) for arm, times in blocks.items()]
    arms.append(ArmResult(name="fp32, batch 4096", status="oom", error="tried to allocate 12.0 GiB"))
    arms.append(ArmResult(name="fp8", status="unavailable", error="this device has no fp8 matrix units"))
    effects = [_effect(arm, np.log(blocks["fp32"] / times)) for arm, times in blocks.items() if arm != "fp32"]
    fields: dict[str, Any] = {
        "name": name,
        "title": "Mixed precision",
        "question": "Which precision trains this model fastest here, and does it still learn the same?",
        "hypothesis": "bf16 keeps the loss; fp16 needs loss scaling to keep it.",
        "claims": ["C1", "C2", "C4"],
        "created": datetime(2026, 12, 1, 9, 30, tzinfo=UTC) + timedelta(days=days),
        "device": "Sample CPU, 2 cores",
        "device_facts": {"kind": "cpu", "power_cap_watts": None},
        "workload": {"model": "vit-nano", "data": "digits", "global_batch": 64, "precision": "fp32"},
        "baseline": "fp32",
        "arms": arms,
        "effects": effects,
        "guards": _guards(),
        "predictions": _predictions(blocks),
        "decisions": _decisions(),
        "protocol": {"block_steps": 5, "max_rounds": 16, "confidence": 0.95},
        "limits": ["Ratios are to fp32 without TF32.", "A short training does not show the accuracy of a long one."],
        "duration_s": 412.0,
    }
    return Finding(**{**fields, **changes})


def _arm(name: str, times: np.ndarray, rng: np.random.Generator) -> ArmResult:
    step = float(np.median(times))
    steps = np.arange(STEPS)
    loss = 0.25 + 2.1 * np.exp(-steps / 22) + rng.normal(0, 0.03, STEPS)
    curves = {"loss": loss.tolist(), "grad_norm": np.exp(rng.normal(0, 0.25, STEPS)).tolist()}
    if name == "fp16, dynamic scaling":
        curves["loss_scale"] = (65536.0 * 2.0 ** (steps // 30 - (steps > 65))).tolist()
    if name == "fp16, no scaling":
        curves["loss"][50:] = [float("nan")] * (STEPS - 50)
    parts = {"data_wait": 0.04, "forward": 0.31, "backward": 0.52, "optimizer": 0.09, "other": 0.04}
    return ArmResult(
        name=name,
        settings={"precision": name.split(",")[0]},
        measurement=Measurement(
            step_time=step,
            samples_per_s=64 / step,
            anatomy=Anatomy(**{part: share * step for part, share in parts.items()}),
            block_step_times=times.tolist(),
            peak_memory_bytes=int(3.1e8 if name == "fp32" else 2.2e8),
            mfu=0.21 if name == "fp32" else None,
        ),
        trajectories=curves,
        evaluations=[{"seed": float(s), "loss": 0.3, "accuracy": 0.91} for s in range(3)],
    )


def _effect(arm: str, logs: np.ndarray) -> Effect:
    centre, half = float(logs.mean()), 2.13 * float(logs.std(ddof=1)) / len(logs) ** 0.5
    interval = Interval(low=float(np.exp(centre - half)), high=float(np.exp(centre + half)))
    return Effect(
        arm=arm,
        ratio=float(np.exp(centre)),
        interval=interval,
        log_ratios=logs.tolist(),
        rounds=len(logs),
        stop="precise",
    )


def _guards() -> list[GuardVerdict]:
    kind = {"kind": "loss equivalence", "margin": 0.05, "seeds": 3}
    inside, wide = Interval(low=-0.012, high=0.021), Interval(low=-0.04, high=0.09)
    return [
        GuardVerdict(arm="bf16", state="passed", difference=0.004, interval=inside, **kind),
        GuardVerdict(arm="fp16, no scaling", state="failed", reason="the loss became NaN at step 50", **kind),
        GuardVerdict(arm="fp16, dynamic scaling", state="inconclusive", difference=0.02, interval=wide, **kind),
    ]


def _predictions(blocks: dict[str, np.ndarray]) -> list[PredictionCheck]:
    checks = []
    for arm, guess in {"fp32": 0.29, "bf16": 0.21}.items():
        measured = float(np.median(blocks[arm]))
        checks.append(
            PredictionCheck(
                arm=arm, quantity="step_time", predicted=guess, measured=measured, error=guess / measured - 1
            )
        )
    checks.append(PredictionCheck(arm="bf16", quantity="ratio", predicted=1.4, measured=1.6, error=1.4 / 1.6 - 1))
    checks.append(
        PredictionCheck(arm="fp32", quantity="peak_memory_bytes", predicted=2.9e8, measured=3.1e8, error=2.9 / 3.1 - 1)
    )
    return checks


def _decisions() -> list[Decision]:
    return [
        Decision(arm="bf16", decision="adopt", reason="faster beyond noise, and the loss is equivalent"),
        Decision(arm="fp16, no scaling", decision="void: guard failed", reason="the loss became NaN"),
        Decision(arm="fp16, dynamic scaling", decision="no effect beyond noise", reason="the interval holds 1"),
        Decision(arm="fp32, batch 4096", decision="no result", reason="the arm ran out of memory"),
        Decision(arm="fp8", decision="no result", reason="unavailable on this device"),
    ]


def bare_finding(statuses: dict[str, Any]) -> Finding:
    """Arms that ended like this, and nothing else; the first is the baseline."""
    arms = [ArmResult(name=n, status=s, error="" if s == "completed" else "trace\nboom") for n, s in statuses.items()]
    said = {"name": "n", "title": "T", "question": "Q?", "hypothesis": "H.", "device": "CPU", "workload": {}}
    return Finding(**said, created=datetime.now(UTC), baseline=arms[0].name, arms=arms)
