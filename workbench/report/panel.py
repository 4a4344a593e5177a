"""One call for notebooks: ``show(finding)``. A panel in JupyterLab; a figure with its tables everywhere else."""

import base64
import os
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from workbench.errors import Refused
from workbench.experiment.finding import Finding
from workbench.report import tables
from workbench.report.figures import VIEWS, available, describe
from workbench.report.style import render

FINDING_MARK = "workbench_finding"
"""Key in an output's metadata that names the finding it shows. The site draws it itself and drops the output."""
LINEAR_ONLY = {"anatomy", "prediction"}


def show(finding: Finding, view: str | None = None) -> None:
    """Display a finding once, in the form that suits where the code runs.

    Args:
        finding: what ``Ablation.run()`` returned.
        view: the figure to begin with, by default the first for which the finding holds data.
    """
    views = available(finding)
    if view is not None and view not in views:
        raise Refused("view of this finding", view, allowed=", ".join(views) or "none: nothing was measured")
    if get_ipython() is None:
        print(finding.headline)
        return
    bundle: dict[str, Any] = {"text/plain": finding.headline, "text/html": static_html(finding, view)}
    if views and in_live_session():
        bundle |= _widget_view(panel(finding, view))
    display(bundle, raw=True, metadata={FINDING_MARK: {"name": finding.name, "created": finding.created.isoformat()}})


def in_live_session() -> bool:
    """Whether a person's Jupyter server runs this kernel: it names the session, and no batch run owns the kernel."""
    return "JPY_SESSION_NAME" in os.environ and "WORKBENCH_RUN_DIR" not in os.environ


def static_html(finding: Finding, view: str | None = None) -> str:
    """One figure and the tables, whole in itself."""
    views = available(finding)
    picture = ""
    if views:
        name = view or views[0]
        data = base64.b64encode(render(VIEWS[name](finding))).decode()
        alt = escape(describe(finding, name), quote=True)
        picture = f'<img src="data:image/png;base64,{data}" alt="{alt}" width="768" style="max-width: 100%">'
    return f"<div>{picture}\n{_numbers(finding)}</div>"


def panel(finding: Finding, view: str | None = None) -> widgets.VBox:
    """Controls over one image: which view, which arms, which scale. The image is drawn anew on each change."""
    views, names = available(finding), [arm.name for arm in finding.arms]
    chooser = widgets.Dropdown(options=views, value=view or views[0], description="view")
    arms = widgets.SelectMultiple(options=names, value=names, rows=min(len(names), 6), description="arms")
    log = widgets.Checkbox(value=True, description="log axis")
    image = widgets.Image(format="png", width=768)
    image.layout.max_width = "100%"
    image.layout.object_fit = "contain"

    def redraw(_: object = None) -> None:
        log.disabled = chooser.value in LINEAR_ONLY
        image.value = render(VIEWS[chooser.value](finding, arms=arms.value, log=log.value))

    for control in (chooser, arms, log):
        control.observe(redraw, names="value")
    redraw()
    controls = widgets.HBox([widgets.VBox([chooser, log]), arms])
    return widgets.VBox([controls, image, widgets.HTML(_numbers(finding))])


def _numbers(finding: Finding) -> str:
    return tables.for_notebook(tables.effects(finding), tables.arms(finding))


def _widget_view(box: widgets.Widget) -> dict[str, Any]:
    mime = "application/vnd.jupyter.widget-view+json"
    return {mime: box._repr_mimebundle_()[mime]}
