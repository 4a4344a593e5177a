"""Croissant manifests (JSON-LD, mlcommons.org/croissant): which files a data set has and what they must hash to. No torch.

Beyond plain Croissant the workbench reads a record set ``splits`` with the number of samples of each, and as measured
variables ``reader``, ``num_classes`` and ``image_shape``.
"""

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from workbench.errors import Refused, nearest

REPOSITORY = Path(__file__).parents[2]
ARCHIVES = (".tar", ".tar.gz", ".tgz")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HASHES = {"sha256": re.compile(r"[0-9a-f]{64}"), "md5": re.compile(r"[0-9a-f]{32}")}


class DataFile(BaseModel):
    """One file: its place below the data set's folder, where to get it (empty: nowhere), and its hash."""

    model_config = ConfigDict(frozen=True)

    name: str
    url: str = ""
    size_bytes: int | None = None
    sha256: str = ""
    md5: str = ""


class Manifest(BaseModel):
    """What the workbench reads of a Croissant file."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str
    licence: str
    citation: str
    files: list[DataFile] = Field(min_length=1)
    reader: Literal["digits", "cifar10", "imagefolder"]
    num_classes: int = Field(gt=1)
    image_shape: tuple[Literal[1, 3], PositiveInt, PositiveInt]
    """Channels, height, width."""
    num_train: PositiveInt
    num_val: PositiveInt
    sha256: str
    """Of the manifest file itself, for provenance."""

    @property
    def archive(self) -> str | None:
        """The name of the one archive that holds everything, where there is one."""
        only = self.files[0].name if len(self.files) == 1 else ""
        return only if only.endswith(ARCHIVES) else None


def manifest_folder() -> Path:
    """``$WORKBENCH_MANIFESTS``, or ``data_manifests/`` of the repository."""
    return Path(os.environ.get("WORKBENCH_MANIFESTS") or REPOSITORY / "data_manifests")


def data_folder() -> Path:
    """Where fetched files lie: ``$WORKBENCH_DATA``, or ``data/`` of the repository."""
    return Path(os.environ.get("WORKBENCH_DATA") or REPOSITORY / "data")


def manifest_names() -> list[str]:
    return sorted(path.stem for path in manifest_folder().glob("*.json"))


def read_manifest(name: str) -> Manifest:
    """The manifest called ``name`` in the manifest folder.

    Raises:
        Refused: there is none (the nearest names are offered), or ``parse_manifest`` refuses it.
    """
    names = manifest_names()
    if name not in names:
        raise Refused(
            "data set", name, allowed=f"a manifest in {manifest_folder()}", fix=nearest(name, names) if names else ""
        )
    return parse_manifest(manifest_folder() / f"{name}.json")


def parse_manifest(path: Path) -> Manifest:
    """Read one Croissant file.

    Raises:
        Refused: not JSON, a field missing or of the wrong kind, no usable hash, a file name or relative address that leads
            out of the data folder, an address that is not http.
    """
    content = path.read_bytes()
    try:
        raw = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise Refused(f"manifest {path} is not JSON (line {error.lineno}: {error.msg})", fix="restore it") from None
    except UnicodeDecodeError as error:
        raise Refused(f"manifest {path} is not UTF-8 ({error.reason})", fix="restore it") from None
    if not isinstance(raw, dict):
        raise Refused(f"manifest {path}", type(raw).__name__, allowed="a JSON object")
    variables = {_text(path, v, "name"): v.get("value") for v in _objects(path, raw, "variableMeasured")}
    splits = _splits(path, raw)
    name = _text(path, raw, "name")
    if not NAME.fullmatch(name) or name != path.stem:
        raise Refused(f"name in manifest {path}", name, allowed=f"{path.stem}, as the file is called")
    files = [o for o in _objects(path, raw, "distribution") if o.get("@type") in {"cr:FileObject", "FileObject"}]
    try:
        return Manifest.model_validate(
            {
                "name": name,
                "description": _text(path, raw, "description"),
                "licence": _text(path, raw, "license"),
                "citation": _text(path, raw, "citeAs"),
                "files": [_file(path, item) for item in files],
                "reader": variables.get("reader"),
                "num_classes": variables.get("num_classes"),
                "image_shape": variables.get("image_shape"),
                "num_train": splits.get("train"),
                "num_val": splits.get("val"),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(
            f"manifest {path}: {'.'.join(map(str, first['loc']))}",
            first["input"],
            allowed=first["msg"],
            fix="compare it with data_manifests/digits.json",
        ) from None


def _objects(path: Path, raw: dict[str, Any], field: str) -> list[dict[str, Any]]:
    value = raw.get(field)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"field {field!r} of manifest {path}", value, allowed="a list of objects")
    return value


def _text(path: Path, raw: dict[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str) or not value:
        raise Refused(f"field {field!r} of manifest {path} is missing or not text", fix=f"add {field!r}")
    return value


def _splits(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    for record_set in _objects(path, raw, "recordSet"):
        if record_set.get("@id") == "splits":
            rows = _objects(path, record_set, "data")
            return {_text(path, row, "splits/name"): row.get("splits/num_samples") for row in rows}
    raise Refused(f"manifest {path} has no record set 'splits'", fix="compare it with data_manifests/digits.json")


def _file(path: Path, item: dict[str, Any]) -> DataFile:
    name, address = _text(path, item, "name"), _text(path, item, "contentUrl")
    _check_inside(path, name)
    scheme = urlsplit(address).scheme
    if not scheme:
        _check_inside(path, address)
    elif scheme not in {"http", "https"}:
        raise Refused(f"address of {name!r} in manifest {path}", address, allowed="http, https, or a relative path")
    hashes = {k: str(item[k]).lower() for k in HASHES if item.get(k)}
    if not hashes:
        raise Refused(f"file {name!r} in manifest {path} has neither sha256 nor md5", fix="add its hash")
    for algorithm, digest in hashes.items():
        if not HASHES[algorithm].fullmatch(digest):
            raise Refused(
                f"{algorithm} of {name!r} in manifest {path}", digest, allowed="hexadecimal digits, all of them"
            )
    size = re.fullmatch(r"(\d+)( B)?", str(item.get("contentSize", "")))
    return DataFile(name=name, url=address if scheme else "", size_bytes=int(size.group(1)) if size else None, **hashes)


def _check_inside(path: Path, name: str) -> None:
    """Refuse a path that could lead out of the data set's folder, on any system."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0] or "\0" in name:
        raise Refused(f"file name in manifest {path}", name, allowed="a relative path without '..'")
