"""What a ladder shows while it runs: which notebook, what it does, how much is left. Written to standard error."""

import statistics
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from workbench.batch.ladder import Ladder, Stage, Watcher
from workbench.batch.status import duration, status_text
from workbench.records.query import progress, scan
from workbench.records.record import RunRecord
from workbench.records.run import Run

LINE_INTERVAL_S = 30.0
"""How often a line is written where no bar can be drawn."""


class Display(Watcher):
    """Bars on a terminal, a line now and then elsewhere."""

    def __init__(self, ladder: Ladder, console: Console) -> None:
        self._ladder, self._console = ladder, console
        self._expected = expected_durations(ladder)
        self._started = self._spoke = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(30),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, number: int, stage: Stage) -> None:
        self._started = self._spoke = time.monotonic()
        self._task = self._bars.add_task(f"{self._place(number)} {escape(stage.name)}", total=None, state="starting")
        if not self._console.is_terminal:
            self._say(number, f"{stage.name} started")

    def skip(self, number: int, stage: Stage) -> None:
        assert stage.done is not None
        self._say(number, f"{stage.name} was completed before ({stage.done.id})")

    def tick(self, number: int, folder: Path) -> None:
        said = progress(folder)
        done, total = said.get("done", 0), said.get("total", 0)
        elapsed = time.monotonic() - self._started
        left = self._left(number, elapsed, done / total if total else 0.0)
        state = str(said.get("label", "running")) + (f" · about {duration(left)} left" if left is not None else "")
        self._bars.update(self._task, completed=done, total=total or None, state=escape(state))
        if not self._console.is_terminal and time.monotonic() - self._spoke > LINE_INTERVAL_S:
            self._spoke = time.monotonic()
            self._say(number, f"{self._ladder.stages[number].name}: {state}")

    def end(self, number: int, record: RunRecord) -> None:
        self._bars.remove_task(self._task)
        took = f" in {duration(time.monotonic() - self._started)}"
        error = f": {record.error}" if record.error else ""
        self._console.print(
            f"{self._place(number)} {escape(record.notebook)} {status_text(record.status)}{took}{escape(error)}",
            soft_wrap=True,
            highlight=False,
        )

    def _say(self, number: int, text: str) -> None:
        self._console.print(f"{self._place(number)} {escape(text)}", soft_wrap=True, highlight=False)

    def _place(self, number: int) -> str:
        return escape(f"[{number + 1}/{len(self._ladder.stages)}]")

    def _left(self, number: int, elapsed: float, fraction: float) -> float | None:
        """Seconds left for all stages: this one by its own progress or its earlier runs, later ones by theirs."""
        this = self._expected.get(self._ladder.stages[number].name)
        here = elapsed * (1 - fraction) / fraction if fraction > 0 else (max(this - elapsed, 0.0) if this else None)
        later = [self._expected.get(s.name) for s in self._ladder.stages[number + 1 :] if s.done is None]
        known = [seconds for seconds in (here, *later) if seconds is not None]
        return sum(known) if len(known) == len(later) + 1 else None


def expected_durations(ladder: Ladder) -> dict[str, float]:
    """Median seconds of each notebook's completed runs at this profile."""
    took = defaultdict(list)
    for record in scan(ladder.root):
        same = record.status == "completed" and record.profile == Path(ladder.plan.profile).stem
        if same and record.started and record.ended:
            took[record.notebook].append((record.ended - record.started).total_seconds())
    return {name: statistics.median(seconds) for name, seconds in took.items()}


class RunDisplay:
    """One run's progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(30),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> "RunDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, run: Run) -> None:
        self._console.print(f"running in {run.dir}", soft_wrap=True, highlight=False, markup=False)

    def tick(self, run: Run) -> None:
        if not (said := progress(run.dir)):
            return
        done, total = said["done"], said["total"]
        elapsed = time.monotonic() - self._began
        left = f" · about {duration(elapsed * (total - done) / done)} left" if done > 0 else ""
        state = escape(said["label"] + left)
        self._bar.update(self._task, completed=done, total=total or None, description=state)
        if not self._console.is_terminal and time.monotonic() - self._spoke > LINE_INTERVAL_S:
            self._spoke = time.monotonic()
            self._console.print(state, soft_wrap=True, highlight=False)
