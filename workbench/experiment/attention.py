"""Attention patterns as arms: what is measured of each, and how a finding's figures are read. Imports no torch.

An arm's blocks time the attention function alone, forward and backward, at every length; its guard runs train a ViT with the
same pattern. Before the first timing the gate holds output and gradients against float64 (``kernels/gate.py``); an arm that fails
it is ``inexact``, and void. The figures travel in a measurement's ``extra`` as ``TOKENS/QUANTITY``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from workbench.errors import Refused, nearest
from workbench.experiment.ablation import Arm
from workbench.experiment.finding import ArmResult, PredictionCheck
from workbench.planner.attention import density

ATTENTION_TASK = "workbench.experiment.attention_task:AttentionTask"
GATE_MARGIN = 2.0
"""Largest error against float64, in units of dense attention's own."""
DENSE = "dense"
PATTERNS: dict[str, dict[str, Any]] = {
    "local": {"radius": 1},
    "strided": {},
    "fixed": {},
    "window_global": {"radius": 1},
    "grid_2d": {"radius": 2},
    "random": {"blocks_per_row": 2},
    "adaptive": {"top_k": 2},
}
"""Options by pattern, in blocks, of ``grid_2d`` in patches."""


def attention_arms(
    patterns: list[str],
    *,
    lengths: list[int],
    block_size: int,
    vit_block_size: int,
    batch: int = 1,
    heads: int = 2,
    head_dim: int = 32,
) -> list[Arm]:
    """Dense attention, then one arm per pattern.

    Args:
        lengths: tokens at which the attention function is measured, rising; powers of two, which 2-D patterns can tile.
        block_size, vit_block_size: of the layouts there, and in the ViT, which has fewer tokens.

    Raises:
        Refused: an unknown pattern, or lengths that no slope can be fitted to.
    """
    for name in patterns:
        if name not in PATTERNS:
            raise Refused("attention pattern", name, allowed=nearest(name, PATTERNS))
    if len(lengths) < 3 or lengths != sorted(set(lengths)) or any(n < 1 or n & (n - 1) for n in lengths):
        raise Refused("lengths", lengths, allowed="three or more powers of two, rising", fix="[512, 1024, 2048]")
    shape = {"lengths": lengths, "block_size": block_size, "batch": batch, "heads": heads, "head_dim": head_dim}
    arms = [Arm(name=DENSE, settings={"model_args": {"attention": "sdpa"}}, task=ATTENTION_TASK, task_args=shape)]
    for name in patterns:
        options = {**PATTERNS[name], "block_size": vit_block_size}
        settings = {"model_args": {"attention": name, "attention_args": options}}
        arms.append(Arm(name=name, settings=settings, task=ATTENTION_TASK, task_args=shape))
    return arms


def predicted_density(arm: Arm, n: int) -> float:
    """By formula, for ``n`` tokens and the block size at which the function is measured."""
    given = arm.settings["model_args"]
    options = {**given.get("attention_args", {}), "block_size": arm.task_args["block_size"]}
    return density(given["attention"], n, **options)


def predict_patterns(arms: list[Arm]) -> list[PredictionCheck]:
    """At the greatest length, time in proportion to live blocks: the ratio is one over the density."""
    n = arms[0].task_args["lengths"][-1]
    return [
        PredictionCheck(
            arm=a.name, quantity="ratio", predicted=1 / predicted_density(a, n), method="1 / density, a bound"
        )
        for a in arms[1:]
    ]


@dataclass(frozen=True)
class Exponent:
    """The power of n in time ∝ n^value, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]".replace("-", "−")


def fitted_exponent(lengths: np.ndarray, values: np.ndarray) -> Exponent:
    """Least squares on log-log axes; the interval is Student's, from the residuals, so curvature widens it."""
    fit = stats.linregress(np.log(lengths), np.log(values))
    half = float(stats.t.ppf(0.975, len(lengths) - 2) * fit.stderr)
    return Exponent(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)


@dataclass(frozen=True)
class PatternRecords:
    """What one arm measured, by length. Arrays of (L,); NaN where a quantity was not measured.

    Attributes:
        seconds: of one forward and backward pass.
        density: live share of the blocks, of the layout that was built.
        kept, peak: bytes after the forward pass beyond q, k and v, and the most of forward and backward.
        eager_kept: bytes kept by attention that writes its scores (dense arm only).
        csr_bytes, mask_bytes: of the layout, and of the same as a boolean token mask.
        error: worst of the four errors against float64, relative; ``dense_error`` is dense attention's own in that place.
    """

    name: str
    lengths: np.ndarray
    seconds: np.ndarray
    density: np.ndarray
    kept: np.ndarray
    peak: np.ndarray
    eager_kept: np.ndarray
    csr_bytes: np.ndarray
    mask_bytes: np.ndarray
    error: np.ndarray
    dense_error: np.ndarray

    def exponent(self, longest: int = 4) -> Exponent:
        """Of time, over the ``longest`` lengths: at short ones overhead hides it."""
        return fitted_exponent(self.lengths[-longest:], self.seconds[-longest:])

    def work_exponent(self, longest: int = 4) -> float:
        """The same fit through the scores computed, n²·density."""
        scores = self.lengths**2 * self.density
        return fitted_exponent(self.lengths[-longest:], scores[-longest:]).value


def pattern_records(arm: ArmResult) -> PatternRecords:
    """The figures of an arm.

    Raises:
        Refused: the arm has none.
    """
    extra = arm.measurement.extra if arm.measurement else {}
    lengths = sorted({int(key.partition("/")[0]) for key in extra if "/" in key})
    if not lengths:
        raise Refused(f"attention figures of arm {arm.name!r}", "none recorded", fix="give its Arm task=ATTENTION_TASK")
    fields = [f for f in PatternRecords.__dataclass_fields__ if f not in ("name", "lengths")]
    columns = {f: np.array([extra.get(f"{n}/{f}", math.nan) for n in lengths]) for f in fields}
    return PatternRecords(arm.name, np.array(lengths), **columns)


def is_attention(arm: ArmResult) -> bool:
    """Whether it was measured as one."""
    return arm.measurement is not None and any("/seconds" in key for key in arm.measurement.extra)
