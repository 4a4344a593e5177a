"""Bringing the files of a manifest, and saying which are there. No torch."""

import http.client
import os
import tempfile
import urllib.request
from pathlib import Path

from pydantic import BaseModel
from rich.progress import Progress

from workbench.data.integrity import is_verified, verify_file, verify_files
from workbench.data.manifest import DataFile, Manifest, manifest_names, read_manifest
from workbench.data.sources import source_folder
from workbench.errors import Refused

TIMEOUT_S = 60


class SourceRow(BaseModel):
    """One line of ``workbench data list``. ``problem`` says why a manifest cannot be used."""

    name: str
    licence: str = ""
    size_bytes: int | None = None
    present: bool = False
    verified: bool = False
    """All files are as they were when their hashes were last found right."""
    description: str = ""
    problem: str = ""


def list_sources() -> list[SourceRow]:
    """One row per manifest. Reads no data file, and a broken manifest does not hide the others."""
    return [_row(name) for name in manifest_names()]


def _row(name: str) -> SourceRow:
    try:
        manifest = read_manifest(name)
        folder = source_folder(manifest)
    except Refused as refusal:
        return SourceRow(name=name, problem=str(refusal))
    sizes = [file.size_bytes for file in manifest.files]
    return SourceRow(
        name=name,
        licence=manifest.licence,
        size_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        present=all((folder / file.name).is_file() for file in manifest.files),
        verified=is_verified(manifest, folder),
        description=manifest.description,
    )


def verify(name: str) -> str:
    """Read every file of a manifest and compare its hash; the sentence to print when all agree.

    Raises:
        Refused: unknown name; the first file that is missing or differs.
    """
    manifest = read_manifest(name)
    verify_files(manifest, source_folder(manifest), reread=True)
    count = len(manifest.files)
    return f"{name}: {count} file{'s' if count > 1 else ''} in {source_folder(manifest)}, every hash as in the manifest"


def fetch(name: str) -> str:
    """Download what is missing of a manifest's files, then verify all; the sentence to print.

    A file gets its name only once its hash agrees, so that one that has its name is whole.

    Raises:
        Refused: unknown name; an address that gives nothing, or another file than the manifest's.
    """
    manifest = read_manifest(name)
    folder = source_folder(manifest)
    for file in manifest.files:
        if not (folder / file.name).is_file() and file.url and manifest.reader != "digits":
            _download(manifest, file, folder / file.name)
    return verify(name)


def _download(manifest: Manifest, file: DataFile, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            _copy(file, partial)
            verify_file(file, partial)
            partial.replace(target)
    except (OSError, http.client.HTTPException) as error:
        raise Refused(
            f"{file.url} for {manifest.name} could not be fetched ({error})",
            fix=f"try again later, or put the file at {target} by hand",
        ) from error


def _copy(file: DataFile, target: Path) -> None:
    request = urllib.request.Request(file.url, headers={"User-Agent": "workbench"})
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer,
        target.open("wb") as out,
        Progress() as progress,
    ):
        # The server's word where it gives one; the bar only pulses without.
        size = answer.headers.get("Content-Length") or file.size_bytes
        task = progress.add_task(file.name, total=int(size) if size else None)
        while chunk := answer.read(1 << 20):
            out.write(chunk)
            progress.advance(task, len(chunk))
        out.flush()
        os.fsync(out.fileno())
