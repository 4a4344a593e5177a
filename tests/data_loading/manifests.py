"""Manifests for tests: the digits' with other files in it."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

DIGITS = json.loads((Path(__file__).parents[2] / "data_manifests" / "digits.json").read_bytes())


def manifest(
    name: str, files: dict[str, bytes], *, url: str = "https://example.org/", reader: str = "imagefolder"
) -> Any:
    """A manifest of files with these contents, to be found below ``url``."""
    result = copy.deepcopy(DIGITS)
    result["name"] = name
    result["distribution"] = [
        {
            "@type": "cr:FileObject",
            "@id": file,
            "name": file,
            "contentUrl": url + file,
            "contentSize": f"{len(content)} B",
            "encodingFormat": "application/octet-stream",
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        for file, content in files.items()
    ]
    values = {"reader": reader, "num_classes": 10, "image_shape": [3, 32, 32]}
    result["variableMeasured"] = [{"@type": "sc:PropertyValue", "name": k, "value": v} for k, v in values.items()]
    return result


def store(folder: Path, content: Any) -> Path:
    path = folder / f"{content['name']}.json"
    path.write_text(json.dumps(content))
    return path
