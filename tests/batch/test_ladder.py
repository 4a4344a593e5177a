"""Ladders: order, one failure among several, resuming, refusals before anything starts."""

import json
from pathlib import Path

import pytest

from tests.batch.notebooks import write_notebook
from workbench.batch.ladder import (
    PLANS,
    Stage,
    Watcher,
    _locked,
    exit_code,
    find_notebooks,
    new_ladder,
    read_profile,
    resumed_ladder,
    run_ladder,
    select,
)
from workbench.batch.preflight import read
from workbench.errors import Refused
from workbench.records.query import scan
from workbench.records.record import RunRecord
from workbench.records.run import Run

PARAMETERS = "steps: int = 1"


class Notes(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, number: int, stage: Stage) -> None:
        self.notes.append(f"begin {stage.name}")

    def skip(self, number: int, stage: Stage) -> None:
        self.notes.append(f"skip {stage.name}")

    def end(self, number: int, record: RunRecord) -> None:
        self.notes.append(f"end {record.status}")


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    """Four notebooks; until a file named ``repaired`` lies beside them, the first fails and the third dies."""
    folder = tmp_path / "notebooks"
    repaired = tmp_path / "repaired"
    cells = {
        "01_fails": f"from pathlib import Path\nassert Path({str(repaired)!r}).exists()",
        "02_middle": "print(steps)",
        "03_dies": f"from pathlib import Path\nimport os\nPath({str(repaired)!r}).exists() or os._exit(0)",
        "99_report": "print(steps)",
    }
    for name, cell in cells.items():
        write_notebook(folder / f"{name}.ipynb", cell, parameters=PARAMETERS)
    write_notebook(folder / "untitled.ipynb", "not a stage")
    return folder


def profile(folder: Path, text: str) -> str:
    (folder / "p.toml").write_text(text)
    return str(folder / "p.toml")


def test_failures_do_not_stop_the_others_and_resuming_repeats_only_them(notebooks: Path, tmp_path: Path) -> None:
    root, small = tmp_path / "runs", profile(tmp_path, "[02_middle]\nsteps = 2\n")
    ladder = new_ladder(small, root=root, folder=notebooks)
    notes = Notes()
    records = run_ladder(ladder, notes)
    assert [r.notebook for r in records] == ["01_fails", "02_middle", "03_dies", "99_report"]
    assert [r.status for r in records] == ["failed", "completed", "killed", "completed"]
    assert exit_code(records) == 1
    assert notes.notes[:4] == ["begin 01_fails", "end failed", "begin 02_middle", "end completed"]
    assert {(r.ladder, r.profile) for r in scan(root)} == {(ladder.plan.id, "p")}
    assert records[1].parameters == {"steps": 2}

    (tmp_path / "repaired").touch()
    notes = Notes()
    again = run_ladder(resumed_ladder("last", root), notes)
    said = ["begin 01_fails", "skip 02_middle", "begin 03_dies", "skip 99_report"]
    assert [n for n in notes.notes if not n.startswith("end")] == said
    assert exit_code(again) == 0
    assert again[1] == records[1]
    assert resumed_ladder(ladder.plan.id, root).plan == ladder.plan
    assert all(stage.done for stage in resumed_ladder("last", root).stages)
    profile(tmp_path, "[02_middle]\nsteps = 3\n")
    left = [stage.name for stage in resumed_ladder("last", root).stages if not stage.done]
    assert left == ["02_middle"], "completed with other parameters"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[02_midle]\nsteps = 2", "02_middle"),
        ("[02_middle]\nstep = 2", "steps"),
        ("[02_middle]\nsteps = 'two'", "steps"),
        ("[99_report]\nsteps = 1.5", "steps"),
        ("steps = 2", "outside a table"),
        ("[02_middle]\nsteps = ", "p.toml: not valid TOML"),
    ],
)
def test_profile_that_is_wrong_anywhere_is_refused_before_anything_starts(
    text: str, said: str, notebooks: Path, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=said):
        new_ladder(profile(tmp_path, text), ["02"], tmp_path / "runs", notebooks)
    assert scan(tmp_path / "runs") == []


def test_one_broken_notebook_keeps_the_whole_ladder_from_starting(notebooks: Path, tmp_path: Path) -> None:
    (notebooks / "03_dies.ipynb").write_text("{")
    with pytest.raises(Refused, match="03_dies"):
        new_ladder(profile(tmp_path, ""), root=tmp_path / "runs", folder=notebooks)


def test_stages_are_chosen_by_number_or_name_in_the_ladders_order(notebooks: Path) -> None:
    found = find_notebooks(notebooks)
    assert [p.stem for p in select(found, ["99", " 02_middle ", "01"])] == ["01_fails", "02_middle", "99_report"]
    assert select(found, [""]) == found
    with pytest.raises(Refused, match="02_middle"):
        select(found, ["02_midle"])


def test_ladders_that_cannot_be_resumed_are_refused(notebooks: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(Refused, match="no ladder"):
        resumed_ladder("last", root)
    ladder = new_ladder(profile(tmp_path, ""), ["02"], root, notebooks)
    with pytest.raises(Refused, match="ladder"):
        resumed_ladder("20200101", root)
    Run.create("02_middle", {"steps": 1}, root, ladder=ladder.plan.id, provenance={})
    with pytest.raises(Refused, match="still running"):
        resumed_ladder("last", root)
    with _locked(ladder), pytest.raises(Refused, match="another process"):
        run_ladder(ladder, Watcher())
    (root / PLANS / f"{ladder.plan.id}.json").write_text('{"id": ')
    with pytest.raises(Refused, match="cannot be read"):
        resumed_ladder("last", root)


def test_unknown_profiles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    for name in ("smokee", "../smoke", "missing.toml", ""):
        with pytest.raises(Refused, match="profile"):
            read_profile(name)
    with pytest.raises(Refused, match="numbered notebooks"):
        find_notebooks(tmp_path)


@pytest.mark.parametrize("name", ["smoke", "cpu", "gpu"])
def test_profiles_of_the_package_fit_the_notebooks(name: str, tmp_path: Path) -> None:
    new_ladder(name, ["00"], tmp_path)


def test_every_notebook_of_the_ladder_has_a_valid_parameters_cell() -> None:
    for path in find_notebooks(Path(__file__).parents[2] / "notebooks"):
        _, cell = read(path)
        assert all(p.help for p in cell.parameters.values()), f"{path.stem}: a parameter without help"


def test_plan_is_kept_out_of_the_way_of_the_records(notebooks: Path, tmp_path: Path) -> None:
    ladder = new_ladder(profile(tmp_path, ""), ["02", "99"], tmp_path / "runs", notebooks)
    plan = json.loads((tmp_path / "runs" / PLANS / f"{ladder.plan.id}.json").read_text())
    assert [Path(p).stem for p in plan["notebooks"]] == ["02_middle", "99_report"]
    assert scan(tmp_path / "runs") == []
