"""Croissant manifests (JSON-LD, mlcommons.org/croissant): which files a data set has and what they must hash to. No torch."""

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import Refused, nearest

REPOSITORY = Path(__file__).parents[2]
CONTEXT_SOURCE = "digits.json"


class DataFile(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    url: str
    size_bytes: int | None = None
    sha256: str = ""
    md5: str = ""

    def verify(self, path: Path) -> None:
        """Refuse a file that is not there or not the one that the manifest names."""
        if not path.is_file():
            raise Refused(
                "data file", str(path), allowed=f"the file at {self.url}", fix="run `workbench data fetch NAME`"
            )
        algorithm, expected = ("sha256", self.sha256) if self.sha256 else ("md5", self.md5)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != expected:
            raise Refused(
                f"{algorithm} of {path}",
                found,
                allowed=f"{expected}, as its manifest says",
                fix="delete the file and fetch it again",
            )


class Manifest(BaseModel):
    """What the workbench reads of a Croissant file."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str
    licence: str
    citation: str
    files: list[DataFile]
    reader: Literal["digits", "cifar10", "imagefolder"]
    num_classes: int
    image_shape: tuple[int, int, int]
    """Channels, height, width."""
    num_train: int
    num_val: int
    sha256: str
    """Of the manifest file itself, for provenance."""


def manifest_folder() -> Path:
    return Path(os.environ.get("WORKBENCH_MANIFESTS", REPOSITORY / "data_manifests"))


def data_folder() -> Path:
    """Where fetched files lie: ``$WORKBENCH_DATA``, or ``data/`` in the working folder."""
    return Path(os.environ.get("WORKBENCH_DATA", "data"))


def manifest_names() -> list[str]:
    return sorted(path.stem for path in manifest_folder().glob("*.json"))


def read_manifest(name: str) -> Manifest:
    """The manifest called ``name`` in the manifest folder."""
    names = manifest_names()
    if name not in names:
        raise Refused(
            "data set", name, allowed="a manifest in data_manifests/", fix=nearest(name, names) if names else ""
        )
    return parse_manifest(manifest_folder() / f"{name}.json")


def parse_manifest(path: Path) -> Manifest:
    """Read one Croissant file.

    Raises:
        Refused: not JSON, a field missing, no hash, or a file name that leads out of the data folder.
    """
    content = path.read_bytes()
    try:
        raw: dict[str, Any] = json.loads(content)
        values = {item["name"]: item["value"] for item in raw["variableMeasured"]}
        files = [_file(path, item) for item in raw["distribution"] if item["@type"] == "cr:FileObject"]
        return Manifest(
            name=raw["name"],
            description=raw["description"],
            licence=raw["license"],
            citation=raw["citeAs"],
            files=files,
            sha256=hashlib.sha256(content).hexdigest(),
            **values,
        )
    except json.JSONDecodeError as error:
        raise Refused(f"manifest {path} is not JSON (line {error.lineno}: {error.msg})", fix="restore it") from None
    except (KeyError, TypeError) as error:
        raise Refused(f"manifest {path} lacks the field {error}", fix=f"compare it with {CONTEXT_SOURCE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(f"manifest {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _file(path: Path, item: dict[str, Any]) -> DataFile:
    name = PurePosixPath(item["name"])
    if name.is_absolute() or ".." in name.parts or "\\" in item["name"] or not name.name:
        raise Refused(f"file name in manifest {path}", item["name"], allowed="a relative path without '..'")
    if not (item.get("sha256") or item.get("md5")):
        raise Refused(f"file {item['name']!r} in manifest {path} has neither sha256 nor md5", fix="add its hash")
    size = str(item.get("contentSize", "")).removesuffix(" B")
    return DataFile(
        name=str(name),
        url=item["contentUrl"],
        size_bytes=int(size) if size.isdigit() else None,
        sha256=item.get("sha256", ""),
        md5=item.get("md5", ""),
    )


def write_manifest(folder: Path, name: str, licence: str, num_classes: int, image_shape: tuple[int, int, int]) -> Path:
    """Write ``data_manifests/<name>.json`` for an image folder with ``train`` and ``val``, every file with its sha256.

    Returns:
        The manifest's path.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    counts = {split: sum(p.is_relative_to(folder / split) for p in files) for split in ("train", "val")}
    context = json.loads((REPOSITORY / "data_manifests" / CONTEXT_SOURCE).read_bytes())["@context"]
    objects = []
    for path in files:
        relative = path.relative_to(folder).as_posix()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        objects.append(
            {
                "@type": "cr:FileObject",
                "@id": relative,
                "name": relative,
                "contentUrl": path.resolve().as_uri(),
                "contentSize": f"{path.stat().st_size} B",
                "encodingFormat": "image/" + path.suffix[1:].lower().replace("jpg", "jpeg"),
                "sha256": digest,
            }
        )
    values = {"reader": "imagefolder", "num_classes": num_classes, "image_shape": list(image_shape)}
    values |= {"num_train": counts["train"], "num_val": counts["val"]}
    manifest = {
        "@context": context,
        "@type": "sc:Dataset",
        "name": name,
        "description": f"Image folder {folder.name}.",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "license": licence,
        "url": folder.resolve().as_uri(),
        "citeAs": name,
        "datePublished": "1970-01-01",
        "version": "1.0.0",
        "distribution": objects,
        "variableMeasured": [{"@type": "sc:PropertyValue", "name": k, "value": v} for k, v in values.items()],
    }
    path = manifest_folder() / f"{name}.json"
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
