"""A headless Chromium for the tests that need one. Where there is none, CI fails and a developer's machine skips."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def find_chromium() -> str:
    """Path of a Chromium: ``WORKBENCH_CHROMIUM``, or the first known name on ``PATH``."""
    given = os.environ.get("WORKBENCH_CHROMIUM")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    reason = f"no {', '.join(NAMES)} on PATH, and WORKBENCH_CHROMIUM is not set; `make browser` installs one"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium(profile: Path, **options: object) -> Iterator[BrowserContext]:
    """A browser with a profile of its own, closed at the end."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=find_chromium(), args=ARGUMENTS, headless=True, **options
        )
        try:
            yield context
        finally:
            context.close()
