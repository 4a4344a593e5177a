"""What can watch a run."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.trainer.loop import Evaluation, StepRecord, Trainer


class Callback:
    """Watches a run; does nothing until some of these are overridden. ``step`` counts attempts from 0.

    The first three are called in each step, as the host gets there: what they compute should stay on the device. The others
    get values that were read from it, for a whole block of steps at once.
    """

    def around_step(self, trainer: "Trainer", step: int) -> AbstractContextManager[object]:
        """A context around the step's forwards, backwards and update; left also when an exception flies."""
        return nullcontext()

    def before_clipping(self, trainer: "Trainer", step: int) -> None:
        """Gradients are whole and unscaled, as the backward passes left them."""

    def after_update(self, trainer: "Trainer", step: int) -> None:
        """The optimizer has moved the weights, unless the update was skipped; gradients are gone."""

    def on_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        """The step's values have been read, in order, some steps later."""

    def on_evaluate(self, trainer: "Trainer", evaluation: "Evaluation") -> None:
        """The validation split has been gone through."""
