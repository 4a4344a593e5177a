"""Everything about a request that can be known to be wrong before a process is started."""

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from workbench.batch.notebook import EXECUTED, Notebook, read_notebook
from workbench.batch.parameters import ParametersCell, inject, read_parameters, remove_injected, resolve
from workbench.batch.sources import Given
from workbench.batch.values import jsonable
from workbench.errors import Refused
from workbench.experiment.ablation import Guard
from workbench.trainer.config import TrainConfig

SHARED = {
    "batch": TrainConfig.model_fields["global_batch"],
    "learning_rate": TrainConfig.model_fields["learning_rate"],
    "steps": TrainConfig.model_fields["steps"],
    "guard_steps": Guard.model_fields["steps"],
    "seeds": Guard.model_fields["seeds"],
    "margin": Guard.model_fields["margin"],
}
"""Parameters that every notebook uses alike, by the field whose range they have."""
PROBE_BYTES = 1 << 20
MIN_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """A notebook that may be started: all checks are done, the values given stand in a cell of their own."""

    path: Path
    notebook: Notebook
    values: dict[str, Any]
    """The typed value of every parameter, defaults included."""
    provenance: dict[str, Any]
    """The device and the data that the parameters name."""

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def recorded(self) -> dict[str, Any]:
        """The values as the run record holds them."""
        return {name: jsonable(value) for name, value in self.values.items()}


def read(path: Path) -> tuple[Notebook, ParametersCell]:
    """A notebook without what earlier runs put in, and its parameters."""
    notebook = read_notebook(path)
    remove_injected(notebook)
    return notebook, read_parameters(notebook, path.name)


def prepare(path: Path, given: Mapping[str, Given]) -> Prepared:
    """Check a notebook and its parameters, and what parameters named ``model``, ``data`` and ``device`` stand for.

    Raises:
        Refused: any of it is wrong. Nothing was started, nothing was written.
    """
    notebook, cell = read(path)
    values = resolve(cell, given, path.name)
    provenance = check_meaning(values)
    if given:
        inject(notebook, cell, {name: values[name] for name in cell.parameters if name in given})
    notebook["metadata"]["papermill"] = {
        "input_path": str(path),
        "output_path": EXECUTED,
        "parameters": {name: jsonable(values[name]) for name in given},
    }
    return Prepared(path, notebook, values, provenance)


def check_meaning(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the parameters that every notebook uses alike; what they stand for, for the run's provenance."""
    found: dict[str, Any] = {}
    for name in SHARED.keys() & values.keys():
        _check_range(name, values[name])
    if isinstance(model := values.get("model"), str):
        from workbench.models.config import check_model

        check_model(model)
    if isinstance(data := values.get("data"), str):
        from workbench.data.sources import check_source

        source = check_source(data)
        found["data"] = {"name": source.name, "manifest_sha256": source.manifest_sha256, "synthetic": source.synthetic}
    if isinstance(device := values.get("device"), str):
        from workbench.hardware.facts import detect

        found["device"] = detect(device).model_dump(mode="json")
    return found


def _check_range(name: str, value: Any) -> None:
    field = SHARED[name]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
        adapter.validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise Refused(f"parameter {name!r}", value, allowed=said) from None


def check_root(root: Path) -> None:
    """Refuse a folder for records that cannot be made, cannot be written to, or is full."""
    probe = root / f".probe-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        allowed = f"a folder that can be written to ({error.strerror})"
        raise Refused("folder for runs", str(root), allowed=allowed, fix="free space, or name another") from None
    if free < MIN_FREE_BYTES:
        said = f"{MIN_FREE_BYTES >> 20} MiB of free space ({free >> 20} MiB are)"
        raise Refused("folder for runs", str(root), allowed=said, fix="free space, or name another")
