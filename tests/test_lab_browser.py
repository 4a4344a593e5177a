"""The panel in a real JupyterLab, driven in a real browser: it appears once, and its controls redraw the figure."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, Page, expect

from tests.browser import chromium, find_chromium
from tests.samples import sample_finding

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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a JupyterLab on a free port, with settings of its own, that serves a notebook with one cell."""
    find_chromium()
    home = tmp_path_factory.mktemp("lab")
    work, runtime, settings = home / "work", home / "runtime", home / "config"
    for folder in (work, runtime, settings / "labconfig"):
        folder.mkdir(parents=True)
    (work / "finding.json").write_text(sample_finding().model_dump_json())
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[new_code_cell(CELL)], metadata=kernel), work / "panel.ipynb")
    news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (settings / "labconfig" / "page_config.json").write_text(json.dumps(news))
    environment = {k: v for k, v in os.environ.items() if k != "WORKBENCH_RUN_DIR"} | {
        "JUPYTER_CONFIG_DIR": str(settings),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--ServerApp.root_dir={work}", f"--IdentityProvider.token={TOKEN}"]
    with (home / "log").open("w") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            yield _address(server, runtime, home / "log")
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
def output(lab: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Locator]]:
    """The page, and the output of the cell after "Run All Cells"."""
    with chromium(tmp_path_factory.mktemp("profile"), viewport={"width": 1280, "height": 1100}) as context:
        page = context.new_page()
        page.goto(f"{lab}lab/tree/panel.ipynb?token={TOKEN}")
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name=re.compile("^Run All Cells")).first.click()
        expect(page.locator(".jp-InputPrompt").first).to_have_text("[1]:", timeout=60_000)
        yield page, page.locator(".jp-OutputArea").first


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


def _source(area: Locator) -> str:
    source = area.locator("img.widget-image").get_attribute("src")
    assert source
    return source
