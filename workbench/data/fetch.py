"""Bringing the files of a manifest, and saying which are there."""

import shutil
import urllib.error
import urllib.request
from typing import Any

from rich.progress import Progress

from workbench.data.manifest import Manifest, data_folder, manifest_names, read_manifest
from workbench.data.sources import check_source
from workbench.errors import Refused


def list_sources() -> list[dict[str, Any]]:
    """One row per manifest: name, licence, size, whether its files are here (hashes are not read)."""
    rows = []
    for name in manifest_names():
        manifest = read_manifest(name)
        size = sum(f.size_bytes or 0 for f in manifest.files) or None
        here = manifest.reader == "digits" or all((data_folder() / name / f.name).is_file() for f in manifest.files)
        rows.append(
            {"name": name, "licence": manifest.licence, "bytes": size, "present": here, "about": manifest.description}
        )
    return rows


def verify(name: str) -> str:
    """Read every file of a manifest and compare its hash; the sentence to print when all agree."""
    info = check_source(name)
    return f"{name}: {info.num_train} training and {info.num_val} validation images, hashes as in the manifest"


def fetch(name: str) -> str:
    """Download the files of a manifest; each gets its final name only once its hash agrees."""
    manifest = read_manifest(name)
    if manifest.reader == "digits":
        return verify(name) + " (installed with scikit-learn)"
    _download(manifest)
    return verify(name)


def _download(manifest: Manifest) -> None:
    folder = data_folder() / manifest.name
    for file in manifest.files:
        target = folder / file.name
        if target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        try:
            with (
                urllib.request.urlopen(file.url, timeout=60) as answer,
                partial.open("wb") as out,
                Progress() as progress,
            ):
                total = int(answer.headers.get("Content-Length") or 0) or None
                with progress.wrap_file(answer, total=total or 0, description=file.name) as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
            file.verify(partial)
            partial.replace(target)
        except (urllib.error.URLError, OSError) as error:
            raise Refused(
                f"{file.url} could not be fetched ({error})", fix=f"put the file at {target} by hand"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
