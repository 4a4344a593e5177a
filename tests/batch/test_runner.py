"""How runs end. Kernels are real; the notebooks of one table run at the same time, which is a test of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import psutil
import pytest

from tests.batch.notebooks import output_text, write_notebook
from workbench.batch.preflight import prepare
from workbench.batch.processes import processes_of
from workbench.batch.runner import run_notebook
from workbench.batch.sources import from_mapping
from workbench.errors import Refused
from workbench.records.query import read, scan
from workbench.records.record import RunRecord

ROOT = Path(__file__).parents[2]
SLEEP = "print('before', flush=True)\nimport time; time.sleep(120)"


class Case(NamedTuple):
    cells: tuple[str, ...]
    status: str
    code: int
    cell_statuses: tuple[str, ...]
    """Of the cells behind the parameters cell."""
    error: str = ""
    options: dict[str, Any] = {}
    printed: str = ""
    """In the last cell that ran."""


CASES = {
    "completed": Case(("print(steps)", "print('b')"), "completed", 0, ("completed",) * 2, printed="b"),
    "error": Case(("1/0", "2"), "failed", 1, ("failed", "pending"), "ZeroDivisionError"),
    "refused": Case(
        ("from workbench.errors import Refused", "raise Refused('plan', 'x')"),
        "refused",
        2,
        ("completed", "refused"),
        "plan: 'x' is not accepted",
    ),
    "os_exit_0": Case(("import os; os._exit(0)", "2"), "killed", 137, ("killed", "pending"), "ended"),
    "sigkill": Case(
        ("print('before', flush=True)\nimport os, time; time.sleep(1); os.kill(os.getpid(), 9)", "2"),
        "killed",
        137,
        ("killed", "pending"),
        "SIGKILL",
        printed="before",
    ),
    "cell_timeout": Case(
        (SLEEP, "2"), "timeout", 124, ("timeout", "pending"), "longer than 2 s", {"cell_timeout": 2}, "before"
    ),
    "run_timeout": Case(
        ("1", SLEEP), "timeout", 124, ("completed", "timeout"), "longer than", {"timeout": 12}, "before"
    ),
    "stdin": Case(("input()", "2"), "failed", 1, ("failed", "pending"), "StdinNotImplementedError"),
    "exit": Case(("import sys; sys.exit(3)", "2"), "failed", 1, ("failed", "pending"), "SystemExit"),
}


def start(path: Path, cells: tuple[str, ...], root: Path, options: dict[str, Any] | None = None) -> RunRecord:
    """Run a notebook that pretends to come from another machine."""
    other = {"name": "conda-env-old-py", "display_name": "Old", "language": "python"}
    notebook = write_notebook(path, *cells, parameters="steps: int = 1", kernelspec=other)
    return run_notebook(prepare(notebook, from_mapping({"steps": 3})), root, **(options or {}))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(len(CASES)) as pool:
        begun = {
            name: pool.submit(start, folder / f"{name}.ipynb", case.cells, folder / "runs", case.options)
            for name, case in CASES.items()
        }
        return {name: future.result() for name, future in begun.items()}


@pytest.mark.parametrize("name", CASES)
def test_run_ends_with_its_true_status_and_keeps_its_output(name: str, ended: dict[str, RunRecord]) -> None:
    case, record = CASES[name], ended[name]
    assert (record.status, record.exit_code) == (case.status, case.code), record.error
    assert case.error in record.error
    assert read(record.dir) == record  # on disk as returned
    notebook = nbformat.read(record.dir / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    statuses = tuple(cell.metadata.papermill.status for cell in notebook.cells[2:])
    assert statuses == case.cell_statuses
    last = max(i for i, cell in enumerate(notebook.cells) if cell.metadata.papermill.status != "pending")
    assert case.printed in output_text(record.dir / "notebook.ipynb", last)
    if case.status in ("killed", "timeout"):
        assert f"[workbench] {case.status}" in output_text(record.dir / "notebook.ipynb", last)


def test_no_process_is_left_of_any_run(ended: dict[str, RunRecord]) -> None:
    assert [p for record in ended.values() for p in processes_of(record.dir)] == []


def test_runs_are_recorded_with_typed_parameters_and_provenance(ended: dict[str, RunRecord]) -> None:
    record = read(ended["completed"].dir)
    assert record.parameters == {"steps": 3}
    assert record.provenance["packages"]["papermill"]
    assert record.started and record.ended and record.started < record.ended
    notebook = nbformat.read(record.dir / "notebook.ipynb", as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.papermill.parameters == {"steps": 3}
    assert output_text(record.dir / "notebook.ipynb", 2) == "3\n"


def test_kernel_does_not_write_the_runners_record_and_knows_its_run(tmp_path: Path) -> None:
    source = (
        "from workbench.records.run import Run\nrun = Run.current('n', {})\nrun.progress(1, 2, 'half')\nrun.log(loss=1.5)\n"
        "run.finish('failed', 'no')\nrun.artifact('a/b.txt').write_text('x')\n"
        "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)"
    )
    record = start(tmp_path / "n.ipynb", (source,), tmp_path / "runs")
    assert read(record.dir).status == "completed"
    assert json.loads((record.dir / "progress.json").read_text())["label"] == "half"
    assert (record.dir / "artifacts" / "a" / "b.txt").read_text() == "x"
    assert list(processes_of(record.dir)) == [], "a process with a session of its own outlived the run"


def with_finding(statuses: dict[str, str]) -> str:
    """A cell that leaves a finding whose arms ended like this; the first is the baseline."""
    return f"""
from workbench.records.run import Run
from tests.samples import bare_finding
Run.current('n', {{}}).save_finding(bare_finding({statuses!r}).model_dump(mode='json'))"""


@pytest.mark.parametrize(
    ("arms", "status", "code", "said"),
    [
        ({"base": "completed", "x": "diverged", "y": "unavailable"}, "completed", 0, ""),
        ({"base": "completed", "x": "crashed", "y": "oom"}, "completed", 1, "2 of 3 arms failed: 'x' crashed"),
        ({"base": "crashed", "x": "crashed"}, "failed", 1, "the baseline 'base' crashed (boom)"),
    ],
)
def test_run_whose_arms_failed_says_so(
    arms: dict[str, str], status: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    record = start(tmp_path / "n.ipynb", (with_finding(arms),), tmp_path / "runs")
    assert (record.status, record.exit_code) == (status, code), record.error
    assert said in record.error


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_orphan_without_the_runs_environment_ends_with_the_run(tmp_path: Path) -> None:
    """Its parent is gone, it leads a session of its own and knows nothing of the run."""
    mark = f"77{os.getpid()}"
    source = f"import subprocess; subprocess.run('env -i setsid sleep {mark} & exit', shell=True)"
    record = start(tmp_path / "n.ipynb", (source,), tmp_path / "runs")
    assert record.status == "completed", record.error
    assert [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-1:] == [mark]] == []


@pytest.mark.parametrize("name", ["a b#ä😀{x}%20", "<img src=x onerror=alert(1)>"])
def test_any_path_works_and_ids_stay_plain(name: str, tmp_path: Path) -> None:
    record = start(tmp_path / name / f"{name}.ipynb", ("print('ok')",), tmp_path / name / "runs")
    assert record.status == "completed", record.error
    assert record.notebook == name
    assert record.id.isascii() and not set(record.id) & set(" #{}%<>()")
    assert output_text(record.dir / "notebook.ipynb", 2) == "ok\n"


def test_floods_of_output_are_cut_and_the_cut_is_said(tmp_path: Path) -> None:
    cells = (
        "for i in range(100_000): print('line', i)",
        "import sys\nfor i in range(101): print(f'\\r{i}%|', end='', file=sys.stderr)",
        "from IPython.display import display\nfor i in range(250): display(i)",
        "'x' * 1_000_000",
    )
    record = start(tmp_path / "n.ipynb", cells, tmp_path / "runs")
    path = record.dir / "notebook.ipynb"
    assert record.status == "completed", record.error
    assert path.stat().st_size < 600_000
    lines = output_text(path, 2)
    assert lines.startswith("line 0\nline 1\n") and lines.endswith("line 99998\nline 99999\n")
    cut = int(next(line for line in lines.splitlines() if "cut here" in line).split()[1].replace(",", ""))
    assert cut + lines.count("line ") == 100_000
    assert output_text(path, 3) == "100%|"
    assert "outputs cut here" in output_text(path, 4) and output_text(path, 4).endswith("249")
    assert "cut here" in output_text(path, 5)


def test_two_runs_into_one_folder_are_one_run_and_one_refusal(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "n.ipynb", "print(1)")

    def attempt(_: int) -> str:
        try:
            return run_notebook(prepare(notebook, {}), tmp_path / "runs", run_id="mine").status
        except Refused as refused:
            assert "mine" in str(refused)
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(attempt, range(2))) == ["completed", "refused"]
    assert [r.status for r in scan(tmp_path / "runs")] == ["completed"]


class Batch:
    """``workbench run`` in a process of its own, on a notebook that prints and then sleeps."""

    def __init__(self, folder: Path, *cells: str) -> None:
        self.notebook = write_notebook(folder / "n.ipynb", *cells)
        self.folder = folder / "runs" / "r"
        command = [sys.executable, "-m", "workbench.cli", "run", str(self.notebook), "--out", str(self.folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_until(self, ready: Callable[[], Any], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.stderr
            time.sleep(0.05)

    def wait_for_output(self, text: str = "before") -> None:
        def saved() -> bool:
            path = self.folder / "notebook.ipynb"
            return path.exists() and text in path.read_text().split('"outputs"', 2)[-1]

        self.wait_until(saved)

    def part(self, module: str) -> psutil.Process:
        return next(p for p in processes_of(self.folder) if module in p.cmdline())

    def is_all_gone(self, seconds: float = 15) -> bool:
        deadline = time.monotonic() + seconds
        while list(processes_of(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not list(processes_of(self.folder))

    def cell_status(self) -> str:
        return nbformat.read(self.folder / "notebook.ipynb", as_version=4).cells[1].metadata.papermill.status


MARKED = "print('be' + 'fore', flush=True)\nimport time; time.sleep(120)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_says_so_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    batch = Batch(tmp_path, MARKED)
    batch.wait_for_output()
    batch.process.send_signal(number)
    batch.process.send_signal(number)  # an impatient user
    assert batch.process.wait(30) == 130
    record = read(batch.folder)
    assert (record.status, record.exit_code) == ("interrupted", 130)
    assert batch.cell_status() == "interrupted"
    assert "before" in output_text(batch.folder / "notebook.ipynb", 1)
    assert batch.is_all_gone()


@pytest.mark.parametrize(
    ("module", "said"), [("workbench.batch.execute", "SIGKILL"), ("ipykernel_launcher", "kernel was killed by SIGKILL")]
)
def test_run_whose_child_is_killed_is_killed(module: str, said: str, tmp_path: Path) -> None:
    batch = Batch(tmp_path, MARKED)
    batch.wait_for_output()
    batch.part(module).kill()
    assert batch.process.wait(30) == 137
    record = read(batch.folder)
    assert (record.status, record.exit_code) == ("killed", 137)
    assert said in record.error
    assert batch.cell_status() == "killed"
    assert "before" in output_text(batch.folder / "notebook.ipynb", 1)
    assert batch.is_all_gone()


def test_run_whose_runner_is_killed_reads_as_killed_and_its_processes_end(tmp_path: Path) -> None:
    batch = Batch(tmp_path, MARKED)
    batch.wait_for_output()
    batch.process.kill()
    batch.process.wait()
    assert batch.is_all_gone()
    record = read(batch.folder)
    assert (record.status, record.exit_code) == ("killed", 137)
    assert "gone" in record.error
    assert batch.cell_status() == "killed"


@pytest.mark.parametrize("after_s", [0.3, 0.8, 1.3])
def test_runner_killed_at_any_moment_leaves_a_readable_record(after_s: float, tmp_path: Path) -> None:
    batch = Batch(tmp_path, MARKED)
    time.sleep(after_s)
    batch.process.kill()
    batch.process.wait()
    assert batch.is_all_gone()
    assert [r.status for r in scan(tmp_path / "runs")] in ([], ["killed"], ["broken"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"cells": [], "nbformat"', "cut off"),
        (b'{"cells": [,]}', "line 1"),
        (b"[1]", "is not a notebook"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"nbformat": 3, "worksheets": []}', "format"),
        (b'{"nbformat": 4}', "no list of cells"),
        (b'{"nbformat": 4, "cells": [3]}', "cell 1 is broken"),
        (b'{"nbformat": 4, "cells": [], "metadata": {"kernelspec": {"language": "R"}}}', "'r' is not accepted"),
        (b'{"nbformat": 4, "cells": []}', "'parameters'"),
        (None, "a file that exists"),
    ],
)
def test_notebook_that_cannot_be_read_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refused, match=said):
        prepare(path, {})


def test_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "n.ipynb", parameters="n: int = 1")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert prepare(path, {}).values == {"n": 1}


def test_root_that_cannot_hold_a_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    prepared = prepare(write_notebook(tmp_path / "n.ipynb"), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="folder for runs"):
        run_notebook(prepared, tmp_path / "file" / "runs")


def test_full_disk_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(write_notebook(tmp_path / "n.ipynb"), {})

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Refused, match="No space left"):
        run_notebook(prepared, tmp_path / "runs")
    assert scan(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ('model: str = "vit-nan"', "vit-nano"),
        ('data: str = "digit"', "digits"),
        ('device: str = "cuda:99"', "device"),
        ('model: str = "no_such_package.module:make"', "no_such_package"),
        ('model: str = "workbench.no_such_module:make"', "can be imported"),
        ("batch: int = 0", "'batch': 0 is not accepted; allowed: greater than 0"),
        ("seeds: int = 1000000000", "'seeds'"),
        ("steps: int = 0", "'steps'"),
        ("learning_rate: float = 1e999", "'learning_rate'"),
        ("learning_rate: float = -1.0", "'learning_rate'"),
        ("margin: float = 1e999", "'margin'"),
    ],
)
def test_value_that_no_run_could_use_is_refused_before_anything_starts(
    parameters: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=said):
        prepare(write_notebook(tmp_path / "n.ipynb", parameters=parameters), {})


def test_device_and_data_of_a_run_are_part_of_its_provenance(tmp_path: Path) -> None:
    path = write_notebook(tmp_path / "n.ipynb", parameters='data: str = "digits"\ndevice: str = "cpu"')
    provenance = prepare(path, {}).provenance
    assert provenance["device"]["kind"] == "cpu"
    assert len(provenance["data"]["manifest_sha256"]) == 64
