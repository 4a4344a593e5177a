"""What all tests share."""

import os

import pytest


@pytest.fixture(autouse=True)
def _outside_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may be started by a run; what they start must not take that run for its own."""
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
    os.environ.setdefault("MPLBACKEND", "agg")
