"""Made-up run folders for the tests of the site, written through the records package, with executed notebooks."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.samples import EVIL, sample_finding
from workbench.experiment.finding import Finding
from workbench.records.record import Status
from workbench.records.run import Run
from workbench.report.panel import FINDING_MARK, static_html


def write_run(
    root: Path, run_id: str, finding: Finding | None = None, status: Status = "completed", error: str = ""
) -> Run:
    run = Run.create(run_id.split("-")[2], {"batch": 64}, root, run_id=run_id, provenance={"git": {"commit": "0" * 40}})
    if finding:
        run.save_finding(finding.model_dump(mode="json"))
    nbformat.write(executed_notebook(finding), run.dir / "notebook.ipynb")
    run.finish(status, error)
    return run


def write_sample_runs(root: Path) -> None:
    """Findings of two notebooks, one with a history, one with a hostile name; a killed, a broken and a hostile run."""
    write_run(root, "20261128-093000-02_mixed_precision-0001", sample_finding(days=-3, seed=1))
    write_run(root, "20261201-093000-02_mixed_precision-0002", sample_finding())
    evil = {
        "title": EVIL,
        "question": f"{EVIL} `x` $y$",
        "device": EVIL,
        "hypothesis": f"```\n{EVIL}",
        "limits": [EVIL],
    }
    write_run(root, "20261201-100000-04_evil-0003", sample_finding("04_evil", claims=["C14"], **evil))
    write_run(root, "20261201-110000-05_sharding-0004", None, "killed", f"arm ended by signal 9\n{EVIL}")
    broken = root / "20261201-120000-06_pipeline-0005"
    broken.mkdir()
    (broken / "run.json").write_text('{"id": "20261201-1200')
    (root / EVIL).mkdir()


def executed_notebook(finding: Finding | None) -> nbformat.NotebookNode:
    """Outputs of every kind that breaks a page: progress bars, floods, scripts, widgets, pictures from elsewhere."""
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "gone", "version_major": 2, "version_minor": 0}}
    fetching = (
        '<script src="https://example.org/a.js"></script><img src="https://example.org/a.png" onerror="alert(1)">'
    )
    outputs = [
        *(new_output("stream", name="stderr", text=f"\r{percent}%|bar") for percent in range(0, 101, 5)),
        new_output("stream", name="stdout", text="flooding line\n" * 20_000),
        new_output("display_data", widget | {"text/plain": "Box()"}),
        new_output("display_data", {"text/html": f"<p>kept text</p>{fetching}", "text/plain": "p"}),
        new_output("error", ename="ValueError", evalue=EVIL, traceback=[f"\x1b[31mValueError\x1b[0m: {EVIL}"]),
    ]
    if finding:
        mark = {FINDING_MARK: {"name": finding.name, "created": finding.created.isoformat()}}
        outputs.append(new_output("display_data", {"text/html": static_html(finding)}, metadata=mark))
    prose = f"# A notebook\n\n$\\frac{{p-1}}{{m+p-1}}$ ![far](https://example.org/b.png)\n\n{fetching}\n\n$$x^2$$\n\n$\\frac$"
    cells = [new_markdown_cell(prose), new_code_cell("ablation.run()", outputs=outputs, execution_count=1)]
    state = {"application/vnd.jupyter.widget-state+json": {"state": {"m": {}}}}
    return new_notebook(cells=cells, metadata={"widgets": state})
