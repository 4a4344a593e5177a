"""From measurements to a verdict: effects, guards, and what follows for each variant."""

import math
import statistics
from typing import Literal, cast

from workbench.experiment.ablation import Guard, Protocol
from workbench.experiment.attention import GATE_MARGIN
from workbench.experiment.finding import Decision, DecisionWord, Effect, GuardVerdict, Interval
from workbench.experiment.measured import MeasuredArm
from workbench.experiment.statistics import equivalence, log_ratio_interval, look_confidence

Stop = Literal["precise", "budget", "rounds"]


def effects(
    baseline: MeasuredArm, variants: list[MeasuredArm], protocol: Protocol, process_spread: float, stop: str
) -> list[Effect]:
    """Throughput ratios of the variants that have two rounds or more beside the baseline's.

    The interval is Bonferroni's over the looks of the sequential rule, so it holds at the protocol's confidence however early
    measuring ended.
    """
    found = []
    for variant in variants:
        ratios = [r for _, r in baseline.log_ratios(variant)]
        if len(ratios) < 2:
            continue
        interval = log_ratio_interval(ratios, look_confidence(protocol.confidence), process_spread)
        found.append(
            Effect(
                arm=variant.name,
                ratio=interval.ratio,
                interval=Interval(low=interval.low, high=interval.high, confidence=protocol.confidence),
                log_ratios=ratios,
                rounds=len(ratios),
                stop=cast(Stop, stop),
            )
        )
    return found


def guard_verdicts(baseline: MeasuredArm, variants: list[MeasuredArm], guard: Guard) -> list[GuardVerdict]:
    """Equivalence to the baseline over the seeds that both trained from; none where no guard was asked for."""
    if guard.kind == "none":
        return []
    return [_verdict(baseline, variant, guard) for variant in variants if variant.status != "unavailable"]


def _verdict(baseline: MeasuredArm, variant: MeasuredArm, guard: Guard) -> GuardVerdict:
    kind = f"{guard.kind} equivalence"
    reference = {g["seed"]: g[guard.kind] for g in baseline.guard_runs}
    pairs = [(g[guard.kind], reference[g["seed"]]) for g in variant.guard_runs if g["seed"] in reference]
    if variant.status == "inexact":
        return GuardVerdict(
            arm=variant.name, kind="gradient error", state="failed", margin=GATE_MARGIN, reason=variant.error
        )
    if variant.status == "diverged":
        return GuardVerdict(
            arm=variant.name, kind=kind, state="failed", margin=guard.margin, seeds=len(pairs), reason=variant.error
        )
    if len(pairs) < 2:
        reason = f"only {len(pairs)} seed was trained by both arms" if pairs else "no seed was trained by both arms"
        return GuardVerdict(
            arm=variant.name, kind=kind, state="not run", margin=guard.margin, seeds=len(pairs), reason=reason
        )
    # A loss has no natural scale: its margin is a share of the baseline's mean loss, unless that is 0. Accuracy's is absolute.
    scale = (statistics.fmean(b for _, b in pairs) if guard.kind == "loss" else 1.0) or 1.0
    test = equivalence(
        [v / scale for v, _ in pairs], [b / scale for _, b in pairs], margin=guard.margin, confidence=guard.confidence
    )
    finite = math.isfinite(test.difference)
    reasons = {
        "passed": "",
        "failed": "the difference lies outside the margin" if finite else "a value is not finite",
        "inconclusive": "the seeds scatter too much to tell; more seeds would settle it",
    }
    return GuardVerdict(
        arm=variant.name,
        kind=kind,
        state=test.state,
        margin=guard.margin,
        difference=test.difference if finite else None,
        interval=Interval(low=test.low, high=test.high, confidence=2 * guard.confidence - 1) if finite else None,
        seeds=len(pairs),
        reason=reasons[test.state],
    )


def decide(
    variants: list[MeasuredArm], measured: list[Effect], guards: list[GuardVerdict], guard: Guard
) -> list[Decision]:
    """One decision per variant. A speed-up counts only where the guard showed equivalence."""
    effect = {e.arm: e for e in measured}
    verdict = {g.arm: g for g in guards}
    return [_decision(v, effect.get(v.name), verdict.get(v.name), guard) for v in variants]


def _decision(variant: MeasuredArm, effect: Effect | None, verdict: GuardVerdict | None, guard: Guard) -> Decision:
    def say(word: DecisionWord, reason: str) -> Decision:
        return Decision(arm=variant.name, decision=word, reason=reason)

    if variant.status == "inexact":  # with or without a guard over seeds
        return say("void: guard failed", variant.error.splitlines()[-1])
    if verdict is not None and verdict.state == "failed":
        return say(
            "void: guard failed", f"{verdict.kind}: {verdict.reason.splitlines()[-1] if verdict.reason else 'failed'}"
        )
    if variant.status != "completed" or effect is None:
        return say(
            "no result", f"{variant.status}: {variant.error.splitlines()[-1]}" if variant.error else "not measured"
        )
    low, high = effect.interval.low, effect.interval.high
    if low <= 1 <= high:
        return say("no effect beyond noise", f"the interval [{low:.3f}, {high:.3f}] holds 1")
    if high < 1:
        return say("reject", f"slower: the whole interval [{low:.3f}, {high:.3f}] lies below 1")
    if guard.kind != "none" and (verdict is None or verdict.state != "passed"):
        state = verdict.state if verdict else "not run"
        return say(
            "void: guard failed",
            f"faster, but equivalence was not shown: {state}; {verdict.reason if verdict else ''}".rstrip("; "),
        )
    shown = "equivalence shown" if guard.kind != "none" else "no guard asked for"
    return say("adopt", f"faster: the whole interval [{low:.3f}, {high:.3f}] lies above 1; {shown}")
