"""How a loss scale moves from one step to the next (Micikevicius et al. 2018). Imports no torch, so simulations can use it."""

from typing import Any

from workbench.trainer.config import LossScaling

LARGEST = 2.0**127
"""The largest power of two that fp32, in which the loss is scaled, can hold; no growth beyond."""


class LossScale:
    """The scale and what decides its next value.

    Attributes:
        value: the scale of the step to come.
        exhausted: the last step overflowed at the floor, where the scale cannot be lowered any more.
    """

    def __init__(self, constants: LossScaling) -> None:
        self.constants = constants
        self.value, self.exhausted = constants.init, False
        self._clean_steps = 0
        self._overflows = 0
        """Since the last growth, for the hysteresis."""

    def update(self, overflowed: bool) -> None:
        """Take note of a step at ``value``."""
        c = self.constants
        self.exhausted = False
        if c.mode != "dynamic":
            return
        if not overflowed:
            self._clean_steps += 1
            if self._clean_steps == c.interval:
                self._clean_steps, self._overflows = 0, 0
                if self.value * c.growth <= LARGEST:
                    self.value *= c.growth
            return
        self._clean_steps, self._overflows = 0, self._overflows + 1
        if self._overflows >= c.hysteresis:
            self.exhausted = self.value <= c.floor
            self.value = max(self.value * c.backoff, c.floor)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "clean_steps": self._clean_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._clean_steps, self._overflows = state["scale"], state["clean_steps"], state["overflows"]
