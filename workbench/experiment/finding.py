"""A finding: what one ablation was asked, what was predicted, what was measured, and what follows.

Plain data, JSON in and out, no torch. ``runs/<id>/finding.json`` holds one; reports and queries read it from there.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.records import query

ArmStatus = Literal["completed", "oom", "killed", "timeout", "diverged", "inexact", "crashed", "unavailable"]
GuardState = Literal["passed", "failed", "inconclusive", "not run"]
DecisionWord = Literal["adopt", "reject", "no effect beyond noise", "void: guard failed", "no result"]
Tier = Literal["measured", "simulated", "cited"]


class Plain(BaseModel):
    """Base of the record types: unknown fields are errors; NaN and infinities survive a round trip through JSON."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Interval(Plain):
    low: float
    high: float
    confidence: float = 0.95


class Anatomy(Plain):
    """Where the median step's seconds go. ``other`` is what the parts leave of the total."""

    data_wait: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0


class Measurement(Plain):
    """What one arm's measured blocks gave. Seconds, bytes, samples per second; medians over blocks."""

    step_time: float
    samples_per_s: float
    anatomy: Anatomy = Anatomy()
    block_step_times: list[float] = []
    """Mean step time of each block, seconds, in round order. ``Finding.protocol`` holds the steps that a block really had."""
    peak_memory_bytes: int | None = None
    """Allocator peak on a GPU; peak resident growth over the idle process on a CPU."""
    mfu: float | None = None
    """Model FLOPs utilisation against the named dtype's dense peak; ``None`` when the peak is not known."""
    energy_joules: float | None = None
    """Joules per step, ``None`` where no meter exists."""
    extra: dict[str, float] = {}


class ArmResult(Plain):
    name: str
    settings: dict[str, Any] = {}
    status: ArmStatus = "completed"
    error: str = ""
    """Last lines of what went wrong, or why the arm is unavailable here."""
    measurement: Measurement | None = None
    trajectories: dict[str, list[float]] = {}
    """Series over steps from the guard's first seed: ``loss``, ``grad_norm``, ``loss_scale``, …"""
    evaluations: list[dict[str, float]] = []
    """One per guard seed: ``seed``, ``loss``, ``accuracy``."""


class Effect(Plain):
    """A variant against the baseline, as a ratio of ``metric`` (above 1 is better for throughput)."""

    arm: str
    metric: str = "samples_per_s"
    ratio: float
    interval: Interval
    log_ratios: list[float] = []
    rounds: int
    stop: Literal["precise", "budget", "rounds"]
    """Why measuring ended: the interval was narrow enough, the time budget was spent, or the rounds were."""


class GuardVerdict(Plain):
    arm: str
    kind: str
    """For example ``loss equivalence`` or ``gradient error``."""
    state: GuardState
    margin: float
    difference: float | None = None
    interval: Interval | None = None
    seeds: int = 0
    reason: str = ""


class PredictionCheck(Plain):
    """A predicted quantity next to the measured one. ``error`` is predicted/measured − 1."""

    arm: str
    quantity: Literal["step_time", "ratio", "peak_memory_bytes"]
    predicted: float
    measured: float | None = None
    error: float | None = None
    method: str = "roofline formula"


class Decision(Plain):
    arm: str
    decision: DecisionWord
    reason: str


def _ended(arm: ArmResult) -> str:
    why = arm.error.strip().splitlines()
    return f"{arm.name!r} {arm.status}" + (f" ({why[-1][:200]})" if why else "")


class Finding(Plain):
    """The result of one ablation, complete enough to be judged without the notebook."""

    schema_version: int = 1
    name: str
    """The notebook's stem, such as ``02_mixed_precision``."""
    title: str
    question: str
    hypothesis: str
    claims: list[str] = []
    """Ids in the claims ledger that this finding speaks to, such as ``C2``."""
    tier: Tier = "measured"
    created: AwareDatetime
    device: str
    """The device's own name, such as ``NVIDIA H200`` or the CPU's model name."""
    device_facts: dict[str, Any] = {}
    workload: dict[str, Any]
    synthetic_data: bool = False
    baseline: str
    arms: list[ArmResult]
    effects: list[Effect] = []
    guards: list[GuardVerdict] = []
    predictions: list[PredictionCheck] = []
    decisions: list[Decision] = []
    protocol: dict[str, Any] = {}
    limits: list[str] = Field(default_factory=list)
    """Where this stops being true."""
    duration_s: float = 0.0

    @model_validator(mode="after")
    def _names_its_arms(self) -> "Finding":
        """What it says is of arms that it has; readers rely on it."""
        known = {arm.name for arm in self.arms}
        lists: tuple[Iterable[Any], ...] = (self.effects, self.guards, self.predictions, self.decisions)
        for name in [self.baseline, *(item.arm for item in chain(*lists))]:
            if name not in known:
                raise ValueError(f"speaks of an arm {name!r} that it does not have")
        return self

    def arm(self, name: str) -> ArmResult:
        return next(a for a in self.arms if a.name == name)

    @property
    def failed_arms(self) -> list[ArmResult]:
        """Arms that ended before they could be measured. Results are: divergence, a failed gate, what a device cannot run."""
        return [a for a in self.arms if a.status not in ("completed", "diverged", "inexact", "unavailable")]

    @property
    def trouble(self) -> tuple[bool, str]:
        """Whether the experiment as a whole failed, and in one line what went wrong; empty if nothing did.

        Without its baseline nothing can be compared. A variant that failed leaves the others' results standing.
        """
        first = self.arm(self.baseline)
        if first.status != "completed":
            return True, f"nothing could be compared: the baseline {_ended(first)}"
        if failed := self.failed_arms:
            said = "; ".join(_ended(arm) for arm in failed)
            return False, f"{len(failed)} of {len(self.arms)} arms failed: {said}"
        return False, ""

    @property
    def headline(self) -> str:
        """One sentence a reader can quote: the decisions with their effects."""
        effects = {e.arm: e for e in self.effects}
        said = []
        for d in self.decisions:
            e = effects.get(d.arm)
            figure = f" ({e.ratio:.2f}× [{e.interval.low:.2f}, {e.interval.high:.2f}])" if e else ""
            said.append(f"{d.arm}: {d.decision}{figure}")
        return "; ".join(said) or "no decision"


def read_finding(folder: Path) -> Finding | None:
    """The finding in a run's folder; ``None`` where there is none or it cannot be read."""
    try:
        return Finding.model_validate(query.finding(folder))
    except ValidationError:
        return None
