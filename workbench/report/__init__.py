"""What people see: figures, tables, the notebook panel, the claims ledger and the site."""

from importlib import import_module
from typing import Any

_HOMES = {
    "show": "panel",
    "show_attention": "attention",
    "show_claims": "notebook",
    "show_contributions": "notebook",
    "show_dtypes": "numerics",
    "show_explosion": "gradients",
    "show_logits": "numerics",
    "show_machine": "notebook",
    "show_pattern_prediction": "attention",
    "show_prediction": "notebook",
    "show_scale": "numerics",
    "show_underflow": "numerics",
}


def __getattr__(name: str) -> Any:
    """Names for notebooks, loaded on first use: they bring widgets and matplotlib, which the ledger does not need."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
