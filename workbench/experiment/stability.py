"""What every layer's recorded gradient norms say of an explosion: the finding alone is enough to find where it began.

Imports no torch; the task that records them is ``recording_task.ExplosionTask``.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.explosion import Explosion, find_explosion
from workbench.experiment.finding import ArmResult
from workbench.experiment.recorded import GRADIENT, WEIGHT, series


@dataclass(frozen=True)
class LayerRecords:
    """What one arm's first guard run recorded.

    Attributes:
        layers: L module names in the model's order.
        norm: (S, L) gradient norms before clipping, by optimizer step.
        weight: (S, L) norms of the weights before the update.
        loss: (S,) training loss.
        loss_scale, skipped: (S,) the scale of each step and whether its update was skipped; ``None`` without loss scaling.
        diverged: whether the run was given up.
    """

    layers: tuple[str, ...]
    norm: np.ndarray
    weight: np.ndarray
    loss: np.ndarray
    loss_scale: np.ndarray | None = None
    skipped: np.ndarray | None = None
    diverged: bool = False

    @property
    def first_nonfinite(self) -> int | None:
        """Step of the first gradient or loss that is NaN or infinite."""
        bad = np.flatnonzero(~np.isfinite(self.norm).all(axis=1) | ~np.isfinite(self.loss))
        return int(bad[0]) if len(bad) else None

    def explosion(self) -> Explosion | None:
        """Where the run exploded. The skips of a run that was given up were no calibration of the loss scale."""
        skipped = None if self.diverged else self.skipped
        return find_explosion(self.layers, range(len(self.norm)), self.norm, self.weight, skipped)


def layer_records(arm: ArmResult) -> LayerRecords:
    """The layer series of an arm's first guard run.

    Raises:
        Refused: the arm recorded none.
    """
    layers, norm = series(arm, GRADIENT)
    _, weight = series(arm, WEIGHT)
    course = {name: np.array(values, dtype=float) for name, values in arm.trajectories.items() if "/" not in name}
    skipped = course["skipped"].astype(bool) if "skipped" in course else None
    return LayerRecords(
        layers, norm, weight, course["loss"], course.get("loss_scale"), skipped, arm.status == "diverged"
    )
