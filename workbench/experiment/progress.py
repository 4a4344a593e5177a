"""Live progress: which arm, which block, which step, how much is left.

In a notebook it is one output, replaced in place and left as one finished line, so that JupyterLab, an executed file and a static
page all look right. In a terminal it is one line that is rewritten. Both work while the parent only waits on pipes.
"""

import sys
import time
from html import escape
from types import TracebackType
from typing import Any

from workbench.records.run import Run

REDRAW_S = 0.25


class LiveProgress:
    """``with LiveProgress(title, run) as live: live.update(seconds_left, "bf16 · round 3/24")``."""

    def __init__(self, title: str, run: Run) -> None:
        self.title, self.run = title, run
        self._began = time.monotonic()
        self._drawn = 0.0
        self._handle: Any = None

    def __enter__(self) -> "LiveProgress":
        if _in_kernel():
            from IPython.display import display

            self._handle = display(self._bundle(0.0, "starting"), raw=True, display_id=True)
        return self

    def update(self, seconds_left: float | None, label: str) -> None:
        """Say what runs now and about how long the rest takes; ``None`` while that is not known."""
        elapsed = time.monotonic() - self._began
        share = 0.0 if seconds_left is None else elapsed / (elapsed + seconds_left + 1e-9)
        self.run.progress(share, 1.0, label)
        if time.monotonic() - self._drawn < REDRAW_S:
            return
        self._drawn = time.monotonic()
        left = "" if seconds_left is None else f" · about {clock(seconds_left)} left"
        self._draw(share, f"{label}{left}")

    def finish(self, line: str) -> None:
        """The one line that stays."""
        elapsed = time.monotonic() - self._began
        self.run.progress(1.0, 1.0, line)
        self._draw(1.0, f"{line} in {clock(elapsed)}")
        if self._handle is None and sys.stderr.isatty():
            sys.stderr.write("\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._draw(1.0, f"ended by {kind.__name__}")

    def _draw(self, share: float, label: str) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(share, label), raw=True)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{self._text(share, label)}")
            sys.stderr.flush()

    def _text(self, share: float, label: str) -> str:
        return f"{self.title}: {share:4.0%} {label}"

    def _bundle(self, share: float, label: str) -> dict[str, str]:
        frame = "display:inline-block;vertical-align:middle;width:12em;height:.6em;border:1px solid currentColor"
        fill = f"width:{share:.0%};height:100%;background:currentColor;opacity:.6"
        bar = f'<div style="{frame}"><div style="{fill}"></div></div>'
        html = f"<div>{bar} <b>{escape(self.title)}</b> {share:.0%} · {escape(label)}</div>"
        return {"text/plain": self._text(share, label), "text/html": html}


def clock(seconds: float) -> str:
    """``48 s``, ``3 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _in_kernel() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
