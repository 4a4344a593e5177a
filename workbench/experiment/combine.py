"""Several optimisations at once: each alone, each left out, and added one by one, measured in one ablation.

Speed-ups do not multiply: what one option removes, another cannot remove again. So a ladder of claims needs all three views, from
the same rounds.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from workbench.errors import Refused
from workbench.experiment.ablation import Arm
from workbench.experiment.finding import Finding, Interval, Plain
from workbench.experiment.statistics import log_ratio_interval

Options = Mapping[str, Mapping[str, Any]]


class Contribution(Plain):
    """What one option gives, as throughput ratios (above 1 is faster), each with its interval."""

    option: str
    alone: float
    alone_interval: Interval
    last: float
    """All options against all but this one: what is lost when it is left out."""
    last_interval: Interval
    added: float
    """All options up to this one against all up to the one before, in the order given."""
    added_interval: Interval


def arm_name(options: Iterable[str]) -> str:
    return " + ".join(options) or "none"


def combination_arms(baseline: Mapping[str, Any], options: Options) -> list[Arm]:
    """The arms that the three views need, each once: the first is the baseline, the last has every option.

    Args:
        baseline: settings without any option.
        options: settings that each option changes, in the order in which they are to be added. Two options may not set one
            field, for then their order would decide.
    """
    if len(options) < 2:
        raise Refused(
            "options of a ladder", list(options), allowed="two or more", fix="name at least two optimisations"
        )
    names = list(options)
    fields = [(field, name) for name, settings in options.items() for field in flatten(settings)]
    for field, name in fields:
        others = [other for f, other in fields if f == field and other != name]
        if others:
            raise Refused(f"options {name!r} and {others[0]!r} both set {field!r}", fix="merge them into one option")
    sets = [(), *((n,) for n in names), *(tuple(names[:k]) for k in range(2, len(names)))]
    sets += [tuple(n for n in names if n != left) for left in names] + [tuple(names)]
    unique = list(dict.fromkeys(sets))
    return [Arm(name=arm_name(chosen), settings=_merged(baseline, *(options[n] for n in chosen))) for chosen in unique]


def contributions(finding: Finding, names: list[str]) -> list[Contribution]:
    """The three views of each option, from the paired rounds of one finding; options whose arms did not complete are left out."""
    logs = {e.arm: np.asarray(e.log_ratios) for e in finding.effects}
    logs["none"] = np.zeros(max((len(v) for v in logs.values()), default=0))
    found = []
    for k, name in enumerate(names):
        pairs = [
            ([name], []),
            (names, [n for n in names if n != name]),
            (names[: k + 1], names[:k]),
        ]
        arms = [(arm_name(a), arm_name(b)) for a, b in pairs]
        if any(a not in logs or b not in logs for a, b in arms):
            continue
        views = [_view(logs[a], logs[b]) for a, b in arms]
        (alone, alone_i), (last, last_i), (added, added_i) = views
        found.append(
            Contribution(
                option=name,
                alone=alone,
                alone_interval=alone_i,
                last=last,
                last_interval=last_i,
                added=added,
                added_interval=added_i,
            )
        )
    return found


def product_of_claims(finding: Finding, names: list[str]) -> tuple[float, float]:
    """The product of the options' ratios alone, and the ratio all of them really gave."""
    ratios = {e.arm: e.ratio for e in finding.effects}
    return float(np.prod([ratios[n] for n in names])), ratios[arm_name(names)]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the fields that ``settings`` sets, nested mappings opened."""
    names = []
    for key, value in settings.items():
        names += flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return names


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = _merged(merged[key], value) if both else value
    return merged


def _view(after: np.ndarray, before: np.ndarray) -> tuple[float, Interval]:
    rounds = min(len(after), len(before))
    interval = log_ratio_interval(after[:rounds] - before[:rounds], confidence=0.95)
    return interval.ratio, Interval(low=interval.low, high=interval.high, confidence=0.95)
