"""Whether the files on disk are those that a manifest names. No torch."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from workbench.data.manifest import DataFile, Manifest
from workbench.errors import Refused

TICK_NS = 50_000_000
"""Longer than the tick by which file systems tell times apart."""


def verify_files(manifest: Manifest, folder: Path, *, reread: bool = False) -> None:
    """Compare the hash of every file with the manifest's.

    A file once verified is not read again until its size, times or inode change, since every process of an experiment asks.

    Args:
        reread: read every file all the same.

    Raises:
        Refused: the first file that is missing or differs, by name, with the hash expected and the hash found.
    """
    known = {} if reread else _remembered(manifest, folder)
    stamps = {}
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            raise Refused(f"data file {path} of {manifest.name} is not there", fix=_how_to_get(manifest, file, folder))
        stamp = _stamp(path)
        if known.get(file.name) != stamp:
            verify_file(file, path)
        stamps[file.name] = stamp
    if stamps != known:
        _remember(manifest, folder, stamps)


def verify_file(file: DataFile, path: Path) -> None:
    """Refuse the file at ``path`` if its hash is not the one of ``file``."""
    algorithm, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    with path.open("rb") as content:
        found = hashlib.file_digest(content, algorithm).hexdigest()
    if found != expected:
        raise Refused(
            f"{algorithm} of {path}",
            found,
            allowed=f"{expected}, as its manifest says",
            fix="delete the file and get it again, or correct the manifest if the change is meant",
        )


def is_verified(manifest: Manifest, folder: Path) -> bool:
    """Whether all files are as they were when their hashes were last found right; reads none of them."""
    known = _remembered(manifest, folder)
    paths = {file.name: folder / file.name for file in manifest.files}
    return all(path.is_file() and known.get(name) == _stamp(path) for name, path in paths.items())


def _how_to_get(manifest: Manifest, file: DataFile, folder: Path) -> str:
    if file.url:
        return f"run `workbench data fetch {manifest.name}`"
    return f"its manifest gives no address: copy or link the folder to {folder}"


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
    if 0 <= age < TICK_NS:
        # A change within one tick of the file system's clock would leave the times as they are.
        time.sleep((TICK_NS - age) / 1e9)
        status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _memory(manifest: Manifest, folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "workbench" / "verified"
    key = hashlib.sha256(f"{folder.resolve()}\n{manifest.sha256}".encode()).hexdigest()
    return cache / f"{manifest.name}-{key[:16]}.json"


def _remembered(manifest: Manifest, folder: Path) -> dict[str, list[int]]:
    try:
        known = json.loads(_memory(manifest, folder).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(manifest: Manifest, folder: Path, stamps: dict[str, list[int]]) -> None:
    """Written whole or not at all; where it cannot be, the files are read again next time."""
    memory = _memory(manifest, folder)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(stamps, file)
        Path(file.name).replace(memory)
    except OSError:
        return
