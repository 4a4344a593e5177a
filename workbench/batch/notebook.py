"""Notebooks as plain JSON: enough to check one and to put values in, without the seconds that a full reader takes to load."""

import json
from pathlib import Path
from typing import Any

from workbench.errors import Refused
from workbench.records.atomic import write_json

EXECUTED = "notebook.ipynb"
"""In a run's folder: the notebook with its outputs, while it runs and after."""
LOG = "log.txt"
"""In a run's folder: what the executing process and the kernel say outside the notebook."""
Notebook = dict[str, Any]
"""A notebook of format 4 in which every source is one string and every cell has metadata."""
Cell = dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    """Read and check a notebook of format 4.

    Raises:
        Refused: not there, empty, cut off, not a notebook, an older format, or not Python.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise Refused("notebook", str(path), allowed="a file that exists", fix="check the path") from None
    except OSError as error:
        raise Refused("notebook", str(path), allowed=f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Refused("notebook", str(path), allowed=f"UTF-8 text (byte {error.start} is not)") from None
    if not text.strip():
        raise Refused(f"notebook {path} is empty", fix="restore it")
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as error:
        cut = "it seems cut off" if error.pos >= len(text.rstrip()) - 1 else error.msg
        raise Refused(f"notebook {path} is not valid JSON (line {error.lineno}: {cut})", fix="restore it") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"notebook {path} is not valid JSON ({error})", fix="restore it") from None
    return _checked(notebook, path)


def write_notebook(path: Path, notebook: Notebook) -> None:
    write_json(path, notebook)


def tags(cell: Cell) -> list[Any]:
    found = cell["metadata"].get("tags")
    return found if isinstance(found, list) else []


def _checked(notebook: Any, path: Path) -> Notebook:
    if not isinstance(notebook, dict) or "nbformat" not in notebook:
        raise Refused(f"{path} is not a notebook", allowed="a Jupyter notebook of format 4")
    if notebook["nbformat"] != 4:
        fix = "open and save it in JupyterLab"
        raise Refused(f"format of notebook {path}", notebook["nbformat"], allowed="4", fix=fix)
    cells, metadata = notebook.get("cells"), notebook.setdefault("metadata", {})
    if not isinstance(cells, list) or not isinstance(metadata, dict):
        raise Refused(f"{path} is not a notebook: it has no list of cells", fix="restore it")
    for number, cell in enumerate(cells, 1):
        if not (isinstance(cell, dict) and isinstance(cell.setdefault("metadata", {}), dict) and "cell_type" in cell):
            raise Refused(f"{path} is not a notebook: cell {number} is broken", fix="restore it")
        source = cell.get("source", "")
        cell["source"] = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if cell.get("cell_type") == "code":
            if not isinstance(cell.setdefault("outputs", []), list):
                raise Refused(f"{path} is not a notebook: cell {number} has outputs that are no list", fix="restore it")
            cell.setdefault("execution_count", None)
    language = _language(metadata)
    if language != "python":
        raise Refused(f"language of notebook {path}", language, allowed="python")
    return notebook


def _language(metadata: Notebook) -> str:
    """The kernel's name says nothing (it may be of another machine); the language does."""
    for entry, key in (("language_info", "name"), ("kernelspec", "language")):
        found = metadata.get(entry)
        if isinstance(found, dict) and found.get(key):
            return str(found[key]).lower()
    return "python"
