"""Every notebook, run as people run them: by our runner, by plain papermill, by JupyterLab's own kernel client."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from workbench.experiment import Finding

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "02_mixed_precision.ipynb"
QUICK = {"steps": 4, "guard_steps": 2, "seeds": 2, "batch": 8, "model_args": {"patch_size": 4}}


def finding(root: Path) -> dict[str, Any]:
    """The one finding below ``root``, checked against its type."""
    (path,) = root.glob("*/finding.json")
    Finding.model_validate_json(path.read_bytes())
    return json.loads(path.read_bytes())


def structure(value: Any) -> Any:
    """A value's shape: names and types, without the numbers that differ from run to run."""
    if isinstance(value, dict):
        return {k: structure(v) for k, v in value.items() if k not in {"device_facts", "log_ratios", "trajectories"}}
    if isinstance(value, list):
        return [structure(v) for v in value[:1]] + [len(value)]
    return "number" if isinstance(value, int | float) else type(value).__name__


@pytest.mark.slow
def test_the_smoke_ladder_runs_every_notebook(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench.cli", "ladder", "--profile", "smoke", "--root", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    records = [json.loads(path.read_bytes()) for path in tmp_path.glob("*/run.json")]
    assert {r["notebook"] for r in records} == notebooks
    assert {r["status"] for r in records} == {"completed"}
    for path in tmp_path.glob("*/finding.json"):
        assert all(arm.status == "completed" for arm in Finding.model_validate_json(path.read_bytes()).arms), path


@pytest.mark.slow
def test_our_runner_plain_papermill_and_a_jupyter_kernel_give_the_same_finding(tmp_path: Path) -> None:
    flags = [part for name, value in QUICK.items() for part in ("-p", name, json.dumps(value))]
    ours = [
        sys.executable,
        "-m",
        "workbench.cli",
        "run",
        str(NOTEBOOK),
        *flags,
        "--root",
        str(tmp_path / "ours" / "runs"),
    ]
    yaml = ["-y", json.dumps(QUICK)]
    plain = [sys.executable, "-m", "papermill", str(NOTEBOOK), "out.ipynb", *yaml, "--no-progress-bar", "-k", "python3"]
    for name, command in {"ours": ours, "plain": plain}.items():
        (tmp_path / name).mkdir()
        done = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source += "\n" + "\n".join(f"{name} = {value!r}" for name, value in QUICK.items())
    (tmp_path / "lab").mkdir()
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / "lab")}}).execute(
        env={**os.environ, "JPY_SESSION_NAME": str(NOTEBOOK)}
    )
    found = [structure(finding(tmp_path / name / "runs")) for name in ("ours", "plain", "lab")]
    assert found[0] == found[1] == found[2]
