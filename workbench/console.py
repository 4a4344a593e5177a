"""What commands print: results to standard output, as text or JSON, the rest to standard error."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def print_json(value: Any) -> None:
    from workbench.records.atomic import to_json

    print(to_json(json.loads(json.dumps(value, default=str)), indent=1))


def stdout() -> "Console":
    """As wide as the terminal; where there is none, wide enough that nothing is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)


def stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True)
