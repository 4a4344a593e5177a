"""Writing and reading run records, with everything that real folders hold."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.errors import Refused
from workbench.records import atomic, query
from workbench.records.atomic import write_json
from workbench.records.query import STALE_AFTER_S, finding, load, progress, read, scan, where
from workbench.records.record import Writer
from workbench.records.run import Run, new_id

HOSTILE = "<img src=x onerror=alert(1)>"


def make(root: Path, notebook: str = "n", **parameters: object) -> Run:
    return Run.create(notebook, parameters, root, provenance={})


def test_run_is_recorded_from_beginning_to_end(tmp_path: Path) -> None:
    run = make(tmp_path, "02_mixed_precision", steps=40)
    assert read(run.dir).status == "running"
    run.log(step=1, loss=math.nan)
    run.log(step=2, loss=0.5)
    run.save_finding({"name": "02_mixed_precision"})
    run.finish("completed")
    record = read(run.dir)
    assert (record.status, record.exit_code, record.parameters) == ("completed", 0, {"steps": 40})
    assert record.started and record.ended and record.started <= record.ended
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == ["NaN", 0.5]
    assert finding(run.dir) == {"name": "02_mixed_precision"}


def test_names_are_data_and_ids_are_plain(tmp_path: Path) -> None:
    run = make(tmp_path, HOSTILE, name=HOSTILE)
    assert read(run.dir).notebook == HOSTILE
    assert where(tmp_path, f"parameters.name = '{HOSTILE}'")[0]["id"] == run.id
    for name in (HOSTILE, "../../etc/passwd", "a" * 500, "", "ä😀", "a/b"):
        assert set(new_id(name)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
        assert len(new_id(name)) < 100


def test_run_into_an_existing_folder_is_refused(tmp_path: Path) -> None:
    Run.create("n", {}, tmp_path, run_id="mine")
    with pytest.raises(Refused, match="mine"):
        Run.create("n", {}, tmp_path, run_id="mine")


def test_broken_records_say_so_and_hide_no_other(tmp_path: Path) -> None:
    good = make(tmp_path, "good", steps=5)
    good.finish("completed")
    whole = (good.dir / "run.json").read_text()
    contents = {
        "a-cut": whole[: len(whole) // 2],
        "b-empty": "",
        "c-list": "[]",
        "d-status": whole.replace("completed", "won"),
        "e-naive": re.sub(r'("started": "[^"]*?)(Z|\+00:00)"', r'\1"', whole),
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    assert contents["e-naive"] != whole
    (tmp_path / "f-missing").mkdir()
    (tmp_path / "g-folder" / "run.json").mkdir(parents=True)
    (tmp_path / "a file").write_text("")
    (tmp_path / ".ladders").mkdir()
    records = {r.id: r for r in scan(tmp_path)}
    assert set(records) == {good.id, *contents, "f-missing", "g-folder"}
    assert records[good.id].status == "completed"
    assert all(r.status == "broken" and r.error for id_, r in records.items() if id_ != good.id)
    assert [row["id"] for row in where(tmp_path, "status = 'completed' and parameters.steps = 5")] == [good.id]
    assert len(where(tmp_path, "status = 'broken'")) == 7


def test_write_that_fails_leaves_the_old_content_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(Refused, match="No space left"):
        make(tmp_path / "runs")
    assert scan(tmp_path / "runs") == []


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from workbench.records.atomic import write_json\n"
        "for i in range(10**6): write_json(Path(sys.argv[1]), {'i': i, 'fill': 'x' * 100_000})"
    )
    path = tmp_path / "a.json"
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=Path(__file__).parents[2])
    try:
        while not path.exists():
            time.sleep(0.01)
        seen = {json.loads(path.read_text())["i"] for _ in range(200)}
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) > 1


def test_running_record_of_a_dead_writer_reads_as_killed(tmp_path: Path) -> None:
    script = "import sys; from workbench.records.run import Run; Run.create('n', {}, sys.argv[1], provenance={})"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[2], check=True)
    (record,) = scan(tmp_path)
    assert (record.status, record.exit_code) == ("killed", 137)
    assert record.ended
    assert '"running"' in (record.dir / "run.json").read_text(), "a reader writes nothing"


def test_reused_process_id_is_not_mistaken_for_the_writer(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.record
    run.record.writer = Writer(pid=os.getpid(), created=1.0, host=Writer.this_process().host)
    run._save()
    assert read(run.dir).status == "killed"


def test_silent_run_of_another_host_is_stale_not_dead(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.record
    run.record.writer = Writer(pid=1, created=1.0, host="elsewhere")
    run._save()
    assert read(run.dir).status == "running"
    long_ago = time.time() - STALE_AFTER_S - 60
    os.utime(run.dir / "run.json", (long_ago, long_ago))
    record = read(run.dir)
    assert (record.status, record.exit_code) == ("stale", None)
    assert "elsewhere" in record.error
    run.progress(1, 2, "alive")
    assert read(run.dir).status == "running"


def test_writer_that_ends_while_its_record_is_read_is_not_called_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path)

    def finish_meanwhile(self: Writer) -> bool:
        run.finish("completed")
        return True

    monkeypatch.setattr(Writer, "is_gone", finish_meanwhile)
    assert read(run.dir).status == "completed"


def test_kernel_of_a_batch_run_writes_beside_the_runners_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(tmp_path)
    before = (batch.dir / "run.json").read_bytes()
    monkeypatch.setenv("WORKBENCH_RUN_DIR", str(batch.dir))
    inside = Run.current("other", {"a": 1}, tmp_path / "elsewhere")
    inside.save_finding({"a": 1})
    inside.finish("failed", "no")
    assert inside.dir == batch.dir
    assert (batch.dir / "run.json").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


def test_interactive_run_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "mine"))
    assert Run.current("n", {}).dir.parent == tmp_path / "mine"


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", ".", "a/../../b"])
def test_artifacts_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="artifact name"):
        make(tmp_path).artifact(name)


def test_progress_is_written_seldom_but_the_end_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path)
    written: list[float] = []
    monkeypatch.setattr("workbench.records.run.write_json", lambda path, value: written.append(value["done"]))
    for step in range(1001):
        run.progress(step, 1000, "steps")
    assert written[0] == 0 and written[-1] == 1000
    assert len(written) < 500


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", "{}"])
def test_broken_progress_and_finding_are_empty(content: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(content)
    (tmp_path / "finding.json").write_text(content)
    assert progress(tmp_path) == {} == finding(tmp_path)


def test_run_is_found_by_id_by_part_and_as_the_last(tmp_path: Path) -> None:
    first = Run.create("a", {}, tmp_path, run_id="20260101-000000-a-0001", provenance={})
    second = Run.create("b", {}, tmp_path, run_id="20260102-000000-b-0002", provenance={})
    (tmp_path / ".ladders").mkdir()
    assert load(tmp_path, first.id).id == load(tmp_path, "0001").id == first.id
    assert load(tmp_path, "last").id == second.id
    for unknown in ("0003", "2026"):
        with pytest.raises(Refused, match=unknown):
            load(tmp_path, unknown)
    with pytest.raises(Refused):
        load(tmp_path / "nowhere", "last")


def test_condition_that_is_not_sql_over_the_record_is_refused(tmp_path: Path) -> None:
    make(tmp_path, steps=1)
    for condition in ("statuss = 'failed'", "status = ", "); drop table x; --"):
        with pytest.raises(Refused, match="condition"):
            where(tmp_path, condition)
    assert where(tmp_path / "nowhere", "status = 'failed'") == []


def test_conditions_reach_parameters_of_runs_that_have_different_ones(tmp_path: Path) -> None:
    make(tmp_path, "a", steps=1, out="x")
    make(tmp_path, "b", lr=0.1, steps=50, limits=[1, None], nothing=None)
    make(tmp_path, "c", steps="many")
    assert [row["notebook"] for row in where(tmp_path, "parameters.lr > 0.05")] == ["b"]
    assert [row["notebook"] for row in where(tmp_path, "notebook in ('a', 'c') -- these two")] == ["a", "c"]


def test_scan_of_many_records_reads_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        make(tmp_path, f"n{i}").finish("completed")
    calls: list[Path] = []
    stored = query._stored
    monkeypatch.setattr(query, "_stored", lambda folder: calls.append(folder) or stored(folder))
    assert len(scan(tmp_path)) == 50 == len(calls)
