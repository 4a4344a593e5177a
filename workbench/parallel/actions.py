"""The passes of a pipeline schedule, and a schedule as a table of them.

F is a micro-batch's forward pass through a stage, I the backward pass for the stage's input, W the one for its weights, and B
both of them in one.
"""

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    microbatch: int


Row = tuple[Action, ...]
Table = tuple[Row, ...]
"""One row per rank, in order of execution."""
