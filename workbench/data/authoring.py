"""A manifest for an image folder of your own. No torch."""

import hashlib
import json
import mimetypes
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.data.folders import class_names, folder_files
from workbench.data.manifest import NAME, REPOSITORY, data_folder, manifest_folder, parse_manifest
from workbench.errors import Refused


def write_manifest(
    folder: Path,
    name: str,
    *,
    licence: str = "not stated",
    citation: str = "not stated",
    image_shape: tuple[int, int, int] = (3, 224, 224),
) -> Path:
    """Write the manifest ``name`` for an image folder, every image with its sha256, and make ``name`` usable as data.

    The manifest holds paths relative to the folder, so it can be committed and used wherever the folder is copied or linked
    to ``name`` in the data folder; here that link is made. Hashing reads every image once: put millions of small files into
    an archive first.

    Args:
        folder: class folders, perhaps below ``train`` and ``val``; see ``folder_files``.
        image_shape: channels, height, width that images are resized and cropped to.

    Returns:
        The manifest's path.

    Raises:
        Refused: not an image folder; a name that cannot be used, or is taken by another manifest or folder.
    """
    folder = Path(folder).expanduser().resolve()
    target, link = manifest_folder() / f"{name}.json", data_folder() / name
    if not NAME.fullmatch(name):
        raise Refused("name of a manifest", name, allowed="letters, digits, '.', '_' and '-'")
    if target.exists():
        raise Refused(f"manifest {target} exists already", fix="choose another name, or delete it")
    if os.path.lexists(link) and link.resolve() != folder:
        raise Refused(f"{link} exists already and is not {folder}", fix="choose another name, or remove it")
    content = _content(folder, name, licence, citation, image_shape)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".writing-") as partial:
        written = Path(partial) / target.name
        written.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        parse_manifest(written)  # refuses, for one, file names that no manifest may hold
        written.replace(target)
    if not os.path.lexists(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder, target_is_directory=True)
    return target


def _content(folder: Path, name: str, licence: str, citation: str, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    # Context and record set are those of a manifest that is checked against the standard.
    model = json.loads((REPOSITORY / "data_manifests" / "digits.json").read_bytes())
    splits = {split: [path for path, _ in folder_files(folder, split)] for split in ("train", "val")}
    paths = sorted(path for members in splits.values() for path in members)
    record_set = model["recordSet"][0]
    record_set["description"] = (
        "By folder, or every fifth image of a class for validation where there is no folder val."
    )
    record_set["data"] = [
        {"splits/name": split, "splits/num_samples": len(members)} for split, members in splits.items()
    ]
    variables = {"reader": "imagefolder", "num_classes": len(class_names(folder)), "image_shape": list(image_shape)}
    newest = max(path.stat().st_mtime for path in paths)
    return {
        "@context": model["@context"],
        "@type": "sc:Dataset",
        "name": name,
        "description": f"{len(paths)} images in {variables['num_classes']} class folders.",
        "conformsTo": model["conformsTo"],
        "license": licence,
        "url": f"data/{name}",
        "citeAs": citation,
        "datePublished": datetime.fromtimestamp(newest, UTC).date().isoformat(),
        "version": "1.0.0",
        "distribution": [_file_object(folder, path) for path in paths],
        "recordSet": [record_set],
        "variableMeasured": [{"@type": "sc:PropertyValue", "name": k, "value": v} for k, v in variables.items()],
    }


def _file_object(folder: Path, path: Path) -> dict[str, Any]:
    relative = path.relative_to(folder).as_posix()
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {
        "@type": "cr:FileObject",
        "@id": relative,
        "name": relative,
        "contentUrl": relative,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        "sha256": digest,
    }
