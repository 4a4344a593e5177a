"""A ladder: several notebooks one after the other, with a profile's parameters. One that fails does not stop the others."""

import contextlib
import fcntl
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from workbench.batch.parameters import resolve
from workbench.batch.preflight import Prepared, check_root, prepare, read
from workbench.batch.runner import run_notebook
from workbench.batch.sources import from_mapping, read_toml
from workbench.errors import Refused, nearest
from workbench.records.atomic import to_json, write_json
from workbench.records.query import scan
from workbench.records.record import RunRecord

_BESIDE_PACKAGE = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = _BESIDE_PACKAGE if _BESIDE_PACKAGE.is_dir() else Path("notebooks")
PROFILES = Path(__file__).parent / "profiles"
PLANS = ".ladders"
"""Folder in the runs' root with one file per ladder: what it was asked to run."""


class Plan(BaseModel):
    """What one ladder runs, kept in ``runs/.ladders/<id>.json`` so that it can be resumed."""

    id: str
    profile: str
    notebooks: list[Path]


@dataclass(frozen=True)
class Stage:
    """One notebook of a ladder, checked; ``done`` is its earlier run when nothing is left to do."""

    prepared: Prepared
    done: RunRecord | None = None

    @property
    def name(self) -> str:
        return self.prepared.stem


@dataclass(frozen=True)
class Ladder:
    plan: Plan
    stages: list[Stage]
    root: Path


class Watcher:
    """Told of a ladder's course; the command line shows it."""

    def begin(self, number: int, stage: Stage) -> None: ...
    def skip(self, number: int, stage: Stage) -> None: ...
    def tick(self, number: int, folder: Path) -> None: ...
    def end(self, number: int, record: RunRecord) -> None: ...


def new_ladder(profile: str, stages: Iterable[str] = (), root: Path = Path("runs"), folder: Path = NOTEBOOKS) -> Ladder:
    """Check all notebooks of a new ladder.

    Args:
        profile: name of a profile that comes with the package, or the path of a TOML file.
        stages: stems or their numbers, such as ``02``; all notebooks of ``folder`` when empty.

    Raises:
        Refused: an unknown profile, stage, notebook or parameter, or anything that a single run would be refused for.
    """
    notebooks = find_notebooks(folder)
    ladder_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    plan = Plan(id=ladder_id, profile=_fixed(profile), notebooks=select(notebooks, stages))
    check_root(root)
    ladder = Ladder(plan, [Stage(p) for p in _prepare(plan, notebooks)], root)
    (root / PLANS).mkdir(exist_ok=True)
    write_json(root / PLANS / f"{plan.id}.json", plan.model_dump(mode="json"))
    return ladder


def resumed_ladder(which: str, root: Path = Path("runs"), profile: str = "", stages: Iterable[str] = ()) -> Ladder:
    """A ladder that was begun before; its completed runs with the parameters that they would have today are kept.

    Args:
        which: a ladder's id, or ``last``.
        profile: another profile than then.
        stages: only these of the ladder's stages.

    Raises:
        Refused: no such ladder, it is still running, or any reason that ``new_ladder`` has.
    """
    plan = _load_plan(which, root)
    plan = plan.model_copy(
        update={"profile": _fixed(profile) or plan.profile, "notebooks": select(plan.notebooks, stages)}
    )
    check_root(root)
    records = [r for r in scan(root) if r.ladder == plan.id]
    if running := [r.id for r in records if r.status == "running"]:
        raise Refused(f"ladder {plan.id} is still running ({running[0]})", fix="wait for it, or stop it")
    done = {(r.notebook, to_json(r.parameters)): r for r in records if r.status == "completed"}
    prepared = _prepare(plan, find_notebooks(plan.notebooks[0].parent))
    return Ladder(plan, [Stage(p, done.get((p.stem, to_json(p.recorded)))) for p in prepared], root)


def run_ladder(ladder: Ladder, watcher: Watcher, *, timeout: float | None = None) -> list[RunRecord]:
    """Run the stages in order; the records of all that were reached. Only the user's interruption ends it early.

    Raises:
        Refused: another process runs this ladder.
    """
    with _locked(ladder):
        return _run_stages(ladder, watcher, timeout)


def _run_stages(ladder: Ladder, watcher: Watcher, timeout: float | None) -> list[RunRecord]:
    records = []
    for number, stage in enumerate(ladder.stages):
        if stage.done is not None:
            watcher.skip(number, stage)
            records.append(stage.done)
            continue
        watcher.begin(number, stage)
        record = run_notebook(
            stage.prepared,
            ladder.root,
            timeout=timeout,
            ladder=ladder.plan.id,
            profile=Path(ladder.plan.profile).stem,
            on_tick=_ticking(watcher, number),
        )
        watcher.end(number, record)
        records.append(record)
        if record.status == "interrupted":
            break
    return records


def exit_code(records: list[RunRecord]) -> int:
    """0 when every run ended well, 130 after an interruption, else 1."""
    if not any(r.exit_code for r in records):
        return 0
    return 130 if records[-1].status == "interrupted" else 1


def find_notebooks(folder: Path) -> list[Path]:
    """The notebooks of a folder in the order of their numbers."""
    found = sorted(p.absolute() for p in folder.glob("*.ipynb") if p.name[:1].isdigit())
    if not found:
        raise Refused(
            "folder of notebooks", str(folder), allowed="one with numbered notebooks, such as 01_baseline.ipynb"
        )
    return found


def select(notebooks: list[Path], stages: Iterable[str]) -> list[Path]:
    """Those notebooks whose stem or number is named, in the ladder's order."""
    wanted = [s.strip() for s in stages if s.strip()]
    for stage in wanted:
        if not any(_names(stage, path) for path in notebooks):
            raise Refused("stage", stage, fix=nearest(stage, [p.stem for p in notebooks]))
    return [p for p in notebooks if any(_names(s, p) for s in wanted)] if wanted else notebooks


def read_profile(name: str) -> dict[str, dict[str, Any]]:
    """Parameters by notebook stem, from a profile of the package or a TOML file."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    known = sorted(p.stem for p in PROFILES.glob("*.toml"))
    if not path.is_file() or (path.parent == PROFILES and path.stem not in known):
        raise Refused(
            "profile", name, allowed="the path of a .toml file, or " + ", ".join(known), fix=nearest(name, known)
        )
    tables = read_toml(path.read_text(encoding="utf-8"), path)
    for stem, values in tables.items():
        if not isinstance(values, dict):
            raise Refused(f"profile {name}: {stem!r} stands outside a table", fix="put it below a notebook's [name]")
    return tables


def _prepare(plan: Plan, notebooks: list[Path]) -> list[Prepared]:
    """Check the whole profile, also what it says of notebooks that this ladder leaves out, and every chosen notebook."""
    tables = read_profile(plan.profile)
    origin = f"profile {plan.profile}"
    by_stem = {path.stem: path for path in notebooks}
    for stem, values in tables.items():
        if stem not in by_stem:
            raise Refused(f"{origin}: notebook", stem, fix=nearest(stem, by_stem))
        _, cell = read(by_stem[stem])
        resolve(cell, from_mapping(values, origin), stem)
    return [prepare(path, from_mapping(tables.get(path.stem, {}), origin)) for path in plan.notebooks]


def _load_plan(which: str, root: Path) -> Plan:
    ids = sorted(p.stem for p in (root / PLANS).glob("*.json"))
    if not ids:
        raise Refused(f"no ladder has been run in {root}", fix="start one with `workbench ladder`")
    chosen = ids[-1] if which == "last" else which
    if chosen not in ids:
        raise Refused("ladder", which, allowed="last, or an id", fix=nearest(which, ids))
    try:
        return Plan.model_validate_json((root / PLANS / f"{chosen}.json").read_bytes())
    except (OSError, ValidationError):
        raise Refused(f"the plan of ladder {chosen} cannot be read", fix="start a new ladder") from None


@contextlib.contextmanager
def _locked(ladder: Ladder) -> Iterator[None]:
    """Hold the ladder's plan; the system lets go of it however this process ends."""
    with (ladder.root / PLANS / f"{ladder.plan.id}.json").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"ladder {ladder.plan.id} is being run by another process", fix="wait for it") from None
        except OSError:  # a file system without locks: better unguarded than not at all
            pass
        yield


def _fixed(profile: str) -> str:
    """A profile's file by its full path, so that the ladder can be resumed from another folder."""
    return str(Path(profile).absolute()) if profile.endswith(".toml") else profile


def _names(stage: str, path: Path) -> bool:
    return stage in (path.stem, path.stem.split("_")[0])


def _ticking(watcher: Watcher, number: int) -> Callable[[Any], None]:
    return lambda run: watcher.tick(number, run.dir)
