"""Refusals: a request that cannot be carried out, said before anything starts.

A refusal names the thing, the value given, what is allowed, and a fix. The command line turns it into exit code 2; in a
notebook it is an ordinary ``ValueError``.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class Refused(ValueError):
    """The request was refused and nothing was started.

    Args:
        thing: what was asked for, in the user's words (``"parameter 'lrr'"``).
        value: the value given.
        allowed: what would have been accepted.
        fix: one thing to do about it.
    """

    def __init__(self, thing: str, value: object = None, *, allowed: str = "", fix: str = "") -> None:
        self.thing, self.value, self.allowed, self.fix = thing, value, allowed, fix
        parts = [thing if value is None else f"{thing}: {value!r} is not accepted"]
        if allowed:
            parts.append(f"allowed: {allowed}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))


def nearest(name: str, options: Iterable[str]) -> str:
    """``"did you mean 'a' or 'b'?"``, or the whole list when nothing comes near."""
    known = sorted(options)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "choose from " + ", ".join(known)


def refusal(of: str, error: "ValidationError", fields: Iterable[str] = ()) -> Refused:
    """What pydantic found wrong first in a value, as a refusal.

    Args:
        of: what was to be made, such as ``TrainConfig``.
        fields: names that it has, to offer the nearest one for a name that it has not.
    """
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or of
    if first["type"] == "extra_forbidden":
        return Refused(f"field of {of}", name, fix=nearest(name, fields))
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    value = first["input"] if first["loc"] else None
    return Refused(f"{name} of {of}" if first["loc"] else f"{of}: {said}", value, allowed=said if first["loc"] else "")
