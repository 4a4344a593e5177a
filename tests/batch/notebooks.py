"""Tiny notebooks for the tests of batch."""

from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook


def notebook(*cells: str, parameters: str | None = "", **metadata: Any) -> NotebookNode:
    """Code cells behind a parameters cell; ``parameters=None`` leaves that out."""
    first = [] if parameters is None else [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    return new_notebook(cells=first + [new_code_cell(source) for source in cells], metadata=metadata)


def write_notebook(path: Path, *cells: str, parameters: str | None = "", **metadata: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(*cells, parameters=parameters, **metadata), path)
    return path


def output_text(path: Path, cell: int) -> str:
    """What cell number ``cell`` (the parameters cell is 0) printed or showed."""
    outputs = nbformat.read(path, as_version=4).cells[cell].outputs
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)
