"""A real JupyterLab in a real browser: the panel redraws, a run shows progress, the kernel answers, Interrupt stops it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser import chromium, find_chromium
from tests.samples import sample_finding
from workbench.records.query import scan

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
TOKEN = "made-for-this-test"
START_S = 90
CELL = """\
from pathlib import Path
from workbench.experiment.finding import Finding
from workbench.report import show

finding = Finding.model_validate_json(Path("finding.json").read_bytes())
show(finding)
"""
LIVE_CELLS = [
    """\
import ipywidgets

label = ipywidgets.Label("untouched")
button = ipywidgets.Button(description="touch")
button.on_click(lambda _: setattr(label, "value", "touched"))
ipywidgets.HBox([button, label])
""",
    """\
from tests.experiment.test_run import ablation, arm
from workbench.experiment import Protocol

endless = Protocol(max_rounds=100_000, effect=1e-9)
ablation(arm("base", sleep=0.05), arm("other", sleep=0.05), protocol=endless).run()
""",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and folder of a JupyterLab on a free port, with settings of its own, that serves two notebooks."""
    find_chromium()
    home = tmp_path_factory.mktemp("lab")
    work, runtime, settings = home / "work", home / "runtime", home / "config"
    for folder in (work, runtime, settings / "labconfig"):
        folder.mkdir(parents=True)
    (work / "finding.json").write_text(sample_finding().model_dump_json())
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[new_code_cell(CELL)], metadata=kernel), work / "panel.ipynb")
    live = new_notebook(cells=[new_code_cell(source) for source in LIVE_CELLS], metadata=kernel)
    nbformat.write(live, work / "live.ipynb")
    news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (settings / "labconfig" / "page_config.json").write_text(json.dumps(news))
    environment = {k: v for k, v in os.environ.items() if k != "WORKBENCH_RUN_DIR"} | {
        "JUPYTER_CONFIG_DIR": str(settings),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "experiment")]),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--ServerApp.root_dir={work}", f"--IdentityProvider.token={TOKEN}"]
    with (home / "log").open("w") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            yield _address(server, runtime, home / "log"), work
        finally:
            server.terminate()


def _address(server: subprocess.Popen, runtime: Path, log: Path) -> str:
    """Where the server listens, as it writes into its runtime folder once it does."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text())["url"]
            except ValueError:
                pass  # half written; look again
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium(tmp_path_factory.mktemp("profile"), viewport={"width": 1280, "height": 1100}) as context:
        yield context


@pytest.fixture(scope="module")
def output(lab: tuple[str, Path], browser: BrowserContext) -> tuple[Page, Locator]:
    """The page, and the output of the cell after "Run All Cells"."""
    page = browser.new_page()
    _run_all(page, f"{lab[0]}lab/tree/panel.ipynb?token={TOKEN}")
    expect(page.locator(".jp-InputPrompt").first).to_have_text("[1]:", timeout=60_000)
    return page, page.locator(".jp-OutputArea").first


def test_show_draws_the_panel_with_one_figure(output: tuple[Page, Locator]) -> None:
    _, area = output
    image = area.locator("img.widget-image")
    image.wait_for(timeout=60_000)
    assert area.locator("img").count() == 1
    assert image.evaluate("picture => picture.naturalWidth") > 0


@pytest.mark.parametrize("view", ["anatomy", "distribution", "trajectories", "prediction", "effects"])
def test_choosing_a_view_draws_another_figure(output: tuple[Page, Locator], view: str) -> None:
    _, area = output
    before = _source(area)
    area.locator("select").first.select_option(label=view)
    expect(area.locator("img.widget-image")).not_to_have_attribute("src", before, timeout=30_000)


def test_scale_and_arms_redraw_the_figure(output: tuple[Page, Locator]) -> None:
    _, area = output
    before = _source(area)
    area.locator("input[type=checkbox]").click()
    expect(area.locator("img.widget-image")).not_to_have_attribute("src", before, timeout=30_000)
    before = _source(area)
    area.locator("select[multiple]").select_option(["bf16", "fp32"])
    expect(area.locator("img.widget-image")).not_to_have_attribute("src", before, timeout=30_000)


def test_a_run_shows_progress_leaves_the_kernel_responsive_and_stops_on_interrupt(
    lab: tuple[str, Path], browser: BrowserContext
) -> None:
    address, work = lab
    page = browser.new_page()
    _run_all(page, f"{address}lab/workspaces/live/tree/live.ipynb?token={TOKEN}")
    progress = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea")
    expect(progress).to_contain_text(re.compile(r"round \d+/100000 .* left"), timeout=60_000)
    page.get_by_role("button", name="touch").click()
    expect(page.locator(".jp-CodeCell").first).to_contain_text("touched", timeout=15_000)
    arms = [p for p in psutil.process_iter(["cmdline"]) if _is_arm(p, work)]
    assert len(arms) == 2
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Interrupt Kernel").click()
    expect(progress).to_contain_text("ended by KeyboardInterrupt", timeout=15_000)
    _, alive = psutil.wait_procs(arms, timeout=10)
    assert not alive
    assert scan(work / "runs")[-1].status == "interrupted"


def _is_arm(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is an arm of a run that was started in ``folder``."""
    try:
        return "workbench.experiment.arm_process" in (process.info["cmdline"] or []) and Path(process.cwd()) == folder
    except psutil.Error:
        return False


def _run_all(page: Page, address: str) -> None:
    page.goto(address)
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()


def _source(area: Locator) -> str:
    source = area.locator("img.widget-image").get_attribute("src")
    assert source
    return source
