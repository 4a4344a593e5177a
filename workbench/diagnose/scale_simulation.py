"""What a growth interval costs in skipped steps: our loss scale over simulated gradients. Simulated, not measured; no torch.

The largest gradient of a step is log-normal and independent of the steps before: log2 of it has standard deviation ``spread``
octaves around a level of 0. A step overflows where scale × gradient exceeds fp16's largest number. Real gradients drift and
come in bursts, so real shares differ; how they depend on the interval is what the simulation shows.
"""

from dataclasses import dataclass

import numpy as np

from workbench.errors import Refused
from workbench.trainer.config import LossScaling
from workbench.trainer.loss_scale import LossScale

LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class SimulatedScale:
    """(S,) the scale of each step and whether it was skipped."""

    scale: np.ndarray
    skipped: np.ndarray

    def skipped_share(self, after: int = 0) -> float:
        """Share of the steps from ``after`` on that were skipped; the first calibration lies before."""
        return float(self.skipped[after:].mean())


def simulate_scaling(constants: LossScaling, *, steps: int, spread: float, seed: int = 0) -> SimulatedScale:
    """A run of ``steps`` steps under ``constants``.

    Raises:
        Refused: no steps, a negative spread, or a mode without a scale.
    """
    if steps < 1 or not spread >= 0 or constants.mode == "none":
        values = (steps, spread, constants.mode)
        raise Refused("steps, spread and mode of a simulation", values, allowed="≥ 1, ≥ 0, dynamic or static")
    largest_gradient = np.exp2(np.random.default_rng(seed).normal(0.0, spread, steps))
    limits = (LARGEST_HALF / largest_gradient).tolist()
    loss_scale = LossScale(constants)
    scales, skips = [], []
    for limit in limits:
        overflowed = loss_scale.value > limit
        scales.append(loss_scale.value)
        skips.append(overflowed)
        loss_scale.update(overflowed)
    return SimulatedScale(np.array(scales), np.array(skips))
