"""The command line as its users meet it: what it loads, what it prints, how it exits."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from nbformat import read as read_notebook

from tests.batch.notebooks import write_notebook
from tests.samples import sample_finding
from workbench import cli
from workbench.batch import doctor
from workbench.records.run import Run

ROOT = Path(__file__).parent.parent
SCHEDULE = ["schedule", "--schedule", "1f1b", "--stages", "8", "--microbatches", "10"]


def start(*arguments: str, **options: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "workbench.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **options)


def workbench(*arguments: str) -> subprocess.CompletedProcess:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def called(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """The command line within this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["workbench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs with findings, one failed run, one broken one."""
    root = tmp_path / "runs"
    for name, steps, status in [("a", 40, "completed"), ("b", 60, "completed"), ("c", 60, "failed")]:
        run = Run.create("02_mixed_precision", {"steps": steps}, root, run_id=f"run-{name}", provenance={"host": "x"})
        if status == "completed":
            run.save_finding(sample_finding(seed=ord(name)).model_dump(mode="json"))
        run.finish(status, "[red]<img src=x>[/red] went wrong\nin two lines" if status == "failed" else "")
    (root / "run-d").mkdir()
    (root / "run-d" / "run.json").write_text("{")
    return root


def test_light_parts_load_no_torch_and_little_else() -> None:
    parts = "workbench, workbench.cli, workbench.planner.predict, workbench.batch.ladder, workbench.batch.runner, "
    parts += "workbench.batch.doctor, workbench.records.query, workbench.records.run, workbench.experiment.finding"
    heavy = ("torch", "numpy", "matplotlib", "nbformat", "IPython", "papermill", "duckdb", "sphinx")
    code = f"import sys; import {parts}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_help_costs_next_to_nothing() -> None:
    """The project's own criterion: half a second, as the median of several, on a machine that may be busy."""

    def median() -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert workbench("--help").returncode == 0
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    assert any(median() < 0.5 for _ in range(4))


def test_every_command_has_help_that_fits_a_line() -> None:
    done = workbench("--help")
    commands = re.findall(r"^  ([a-z]+)  +(.*)$", done.stdout.split("Commands:")[1], flags=re.M)
    assert [c for c, _ in commands] == [
        "doctor",
        "run",
        "ladder",
        "status",
        "runs",
        "show",
        "compare",
        "dryrun",
        "schedule",
        "site",
        "lab",
        "data",
    ]
    assert not [text for _, text in commands if text.endswith("...")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "missing.ipynb"], "a file that exists"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "stepps", "1"], "did you mean 'steps'"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "steps", "many"], "not an integer"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "steps"], "-p NAME VALUE"),
        (["run", "notebooks/01_baseline.ipynb", "-y", "[1]"], "a list"),
        (["run", "notebooks/01_baseline.ipynb", "-f", "none.toml"], "none.toml"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "model", "vit-nan"], "vit-nano"),
        (["run", "notebooks/01_baseline.ipynb", "--timeout", "-1"], "timeout"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "learning_rate", "nan"], "'learning_rate'"),
        (["run", "notebooks/01_baseline.ipynb", "-p", "steps", "1e21"], "'steps'"),
        (["run", "notebooks/01_baseline.ipynb", "--out", "/"], "--out"),
        (["run", "--bogus"], "--bogus"),
        (["status", "--root", "README.md"], "a folder"),
        (["runs", "--where", "1 = 1); drop table runs; --"], "condition"),
        (["runs", "--where", "id in (select content from read_text('README.md'))"], "condition"),
        (["ladder", "--stages", "77"], "stage"),
        (["ladder", "--profile", "smokee"], "smoke"),
        (["ladder", "--resume", "last"], "no ladder"),
        (["show", "nothing"], "run-a"),
        (["show", "run-"], "names one run"),
        (["runs", "--where", "statuss = 1"], "condition"),
        (["data", "verify", "digitz"], "digits"),
        (["dryrun", "--model", "vit-10bb"], "vit-10b"),
        (["dryrun", "--model", "vit-nano", "--plan", "fsdpp"], "fsdp"),
        (["dryrun", "--model", "vit-nano", "--world", "many"], "world"),
        (["nonsense"], "nonsense"),
        ([*SCHEDULE, "--schedule", "1f1"], "did you mean '1f1b'"),
        ([*SCHEDULE, "--stages", "0"], "--stages"),
        ([*SCHEDULE, "--stages", "-4"], "--stages"),
        ([*SCHEDULE, "--microbatches", "0"], "--microbatches"),
        ([*SCHEDULE, "--forward", "nan"], "forward time"),
        ([*SCHEDULE, "--backward-weight", "-1"], "backward-weight time"),
        ([*SCHEDULE, "--transfer", "inf"], "transfer time"),
        ([*SCHEDULE, "--forward", "0", "--backward-input", "0", "--backward-weight", "0"], "above 0"),
        ([*SCHEDULE, "--schedule", "interleaved-1f1b"], "take 8 or 16"),
        ([*SCHEDULE, "--chunks", "2"], "interleaved-1f1b"),
        ([*SCHEDULE, "--microbatches", "100000000"], "at most"),
        ([*SCHEDULE, "--gantt", "nowhere/out.svg"], "a folder that exists"),
        ([*SCHEDULE, "--gantt", "tests"], ".svg or .png"),
        ([*SCHEDULE, "--gantt", "/proc/out.svg"], "can be written"),
    ],
)
def test_wrong_requests_are_refused_with_two_and_start_nothing(
    arguments: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(runs))
    before = sorted(runs.iterdir())
    code, out, err = called(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert sorted(runs.iterdir()) == before


def test_run_prints_its_folder_and_exits_as_the_run_did(tmp_path: Path) -> None:
    good = write_notebook(tmp_path / "good.ipynb", "print(x, tag)", parameters="x: float = 0.0\ntag: str | None = None")
    bad = write_notebook(tmp_path / "bad.ipynb", "1/0")
    root = str(tmp_path / "runs")
    begun = [
        start("run", str(good), "-p", "x", "-1e-3", "-r", "tag", "none", "--root", root),
        start("run", str(bad), "--root", root, "--json"),
    ]
    (out, err), (bad_out, _) = [process.communicate(timeout=120) for process in begun]
    assert [process.returncode for process in begun] == [0, 1], err
    executed = read_notebook(Path(out.strip()) / "notebook.ipynb", as_version=4)
    assert executed.cells[2].outputs[0].text == "-0.001 none\n"
    record = json.loads(bad_out)
    assert (record["status"], record["exit_code"], record["error"]) == (
        "failed",
        1,
        "ZeroDivisionError: division by zero",
    )


def test_notebooks_parameters_can_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_notebook(tmp_path / "n.ipynb", parameters='precision: Literal["fp32", "bf16"] = "bf16"  # numbers')
    monkeypatch.setattr(sys, "argv", ["workbench", "run", str(path), "--help-notebook"])
    assert called(capsys, monkeypatch, "run", str(path), "--help-notebook") == (
        0,
        "precision: one of 'fp32', 'bf16' = 'bf16'  # numbers\n",
        "",
    )
    _, out, _ = called(capsys, monkeypatch, "run", str(path), "--help-notebook", "--json")
    assert json.loads(out)[0] == {
        "name": "precision",
        "type": "one of 'fp32', 'bf16'",
        "default": "bf16",
        "help": "numbers",
    }


def test_status_lists_all_runs_and_their_markup_as_text(
    runs: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = called(capsys, monkeypatch, "status", "--root", str(runs))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", "run-a", "run-b", "run-c", "run-d"]
    assert "[red]<img src=x>[/red] went wrong" in out
    assert "in two lines" not in out
    code, out, _ = called(capsys, monkeypatch, "status", "--root", str(runs), "-n", "1", "--json")
    assert [(row["id"], row["status"]) for row in json.loads(out)] == [("run-d", "broken")]


def test_runs_are_selected_by_sql(runs: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = "status = 'completed' and parameters.steps > 50"
    code, out, _ = called(capsys, monkeypatch, "runs", "--where", condition, "--root", str(runs))
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["run", "run-b"])
    _, out, _ = called(capsys, monkeypatch, "runs", "--where", condition, "--root", str(runs), "--json")
    assert json.loads(out)[0]["parameters"]["steps"] == 60
    code, out, err = called(capsys, monkeypatch, "runs", "--where", "status = 'timeout'", "--root", str(runs))
    assert (code, out, "no runs" in err) == (0, "", True)


def test_run_is_shown_with_its_finding_and_two_are_compared(
    runs: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = called(capsys, monkeypatch, "show", "run-a", "--root", str(runs))
    effect = sample_finding(seed=ord("a")).effects[0]
    assert f"{effect.arm} adopt {effect.ratio:.2f}×" in " ".join(out.split())
    _, out, _ = called(capsys, monkeypatch, "show", "run-c", "--root", str(runs))
    assert "in two lines" in out
    _, out, _ = called(capsys, monkeypatch, "show", "run-a", "--root", str(runs), "--json")
    assert json.loads(out)["finding"]["name"] == sample_finding().name
    _, out, _ = called(capsys, monkeypatch, "compare", "run-a", "run-b", "--root", str(runs), "--json")
    differences = {row["about"]: (row["first"], row["second"]) for row in json.loads(out)["differences"]}
    assert differences["parameters.steps"] == ("40", "60")
    assert any(about.startswith("effect of bf16") for about in differences)
    assert "provenance.host" not in differences
    code, out, _ = called(capsys, monkeypatch, "compare", "run-a", "run-d", "--root", str(runs))
    assert code == 0 and "broken" in out


def test_schedule_gives_bubble_makespan_and_activations_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "out.svg"
    code, out, err = called(capsys, monkeypatch, *SCHEDULE, "--json", "--gantt", str(picture))
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["bubble_fraction"] == pytest.approx(7 / 17) == answer["theory"]["bubble_fraction"]
    assert answer["makespan"] == 17 * 3
    assert answer["peak_in_flight"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert picture.read_text().startswith("<?xml")
    code, out, _ = called(capsys, monkeypatch, *SCHEDULE)
    assert code == 0 and "bubble 41.2%, makespan 51" in out and "(p−1)/(m+p−1) = 41.2%" in out


def test_schedule_divides_a_stage_among_its_chunks(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that all schedules do the same work, and their memory compares."""
    options = ["--stages", "4", "--microbatches", "8", "--json"]
    answers = {
        name: json.loads(called(capsys, monkeypatch, "schedule", "--schedule", name, *options)[1])
        for name in ("1f1b", "interleaved-1f1b", "zb-v", "looped-bfs")
    }
    assert {stage["busy"] for answer in answers.values() for stage in answer["per_stage"]} == {24.0}
    assert answers["zb-v"]["peak_in_flight"] == [4] * 4 and answers["looped-bfs"]["peak_in_flight"] == [8] * 4
    assert answers["interleaved-1f1b"]["peak_in_flight"][0] == (4 + 2 * 3 + 1) / 2
    assert answers["zb-v"]["bubble_fraction"] < answers["interleaved-1f1b"]["bubble_fraction"] < 3 / 11


def test_ladder_reports_every_stage_and_exits_with_one_if_any_failed(tmp_path: Path) -> None:
    for name, cell in [("00_good", "print(1)"), ("01_bad", "1/0")]:
        write_notebook(tmp_path / "notebooks" / f"{name}.ipynb", cell)
    (tmp_path / "p.toml").write_text("")
    folders = ["--notebooks", str(tmp_path / "notebooks"), "--root", str(tmp_path / "runs")]
    done = workbench("ladder", "--profile", str(tmp_path / "p.toml"), *folders)
    assert done.returncode == 1, done.stderr
    assert re.search(r"00_good +completed", done.stdout) and re.search(r"01_bad +failed", done.stdout)
    assert "1 of 2 completed" in done.stderr
    assert "[2/2] 01_bad failed" in done.stderr


def test_doctor_names_what_is_missing_and_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_found", lambda module: False)
    code, out, _ = called(capsys, monkeypatch, "doctor", "--root", str(tmp_path), "--json")
    checks = {check["subject"]: check for check in json.loads(out)}
    assert code == 0
    assert checks["CPU"]["state"] == "yes"
    assert checks["extra timm"] == {
        "subject": "extra timm",
        "state": "no",
        "detail": "models named timm:NAME: timm, torchvision not installed",
        "fix": "pip install -e '.[timm]'",
    }
    code, out, _ = called(capsys, monkeypatch, "doctor", "--root", str(tmp_path))
    assert "pip install -e '.[hf]'" in out


def test_doctor_knows_the_extras_of_the_project() -> None:
    import tomllib

    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert set(doctor.EXTRAS) == extras - {"dev"}


@pytest.mark.slow
def test_lab_listens_on_this_machine_alone_and_asks_for_its_token(tmp_path: Path) -> None:
    environment = os.environ | {
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "c"),
    }
    arguments = ["lab", "--no-browser", "--port", "0", "--folder", str(tmp_path), "--root", str(tmp_path / "runs")]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "workbench.cli", *arguments]
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not (found := list((tmp_path / "runtime").glob("jpserver-*.json"))) or not found[0].read_text():
            assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        information = json.loads(found[0].read_text())
        assert len(information["token"]) >= 32
        assert {c.laddr.ip for c in psutil.Process(server.pid).net_connections("tcp") if c.status == "LISTEN"} == {
            "127.0.0.1"
        }
        assert information["token"] not in " ".join(psutil.Process(server.pid).cmdline())
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{information['url']}api/contents", timeout=30)
        with urllib.request.urlopen(
            f"{information['url']}api/contents?token={information['token']}", timeout=30
        ) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.wait(30)
