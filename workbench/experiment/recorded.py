"""Series by layer in an arm's trajectories, which travel as ``prefix/LAYER`` with one value per step. Imports no torch."""

import numpy as np

from workbench.errors import Refused
from workbench.experiment.finding import ArmResult

NUMERICS_TASK = "workbench.experiment.recording_task:NumericsTask"
"""Records ``ZERO``, ``FLUSHED`` and ``LOGIT``."""
EXPLOSION_TASK = "workbench.experiment.recording_task:ExplosionTask"
"""Records ``GRADIENT`` and ``WEIGHT``."""

GRADIENT, WEIGHT = "gradient/", "weight/"
"""2-norms of a layer's gradient before clipping, and of its weights before the update."""
ZERO, FLUSHED = "zero/", "flushed/"
"""Shares of a layer's gradient: exactly zero; not zero, but zero in fp16 at the step's loss scale."""
LOGIT = "logit/"
"""The largest attention logit of a layer."""


def series(arm: ArmResult, prefix: str) -> tuple[tuple[str, ...], np.ndarray]:
    """L layers in the model's order and their (S, L) values.

    Raises:
        Refused: the arm recorded none.
    """
    found = {k.removeprefix(prefix): values for k, values in arm.trajectories.items() if k.startswith(prefix)}
    if not found:
        fix = "give its Arm the task that records them, and a guard"
        raise Refused(f"series {prefix}… of arm {arm.name!r}", "none recorded", fix=fix)
    return tuple(found), np.array(list(found.values()), dtype=float).T
