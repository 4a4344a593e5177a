"""Image folders: which files belong to which class and split. No torch."""

import tarfile
import tempfile
import zlib
from pathlib import Path

from workbench.errors import Refused

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"})
HELD_OUT = 5
"""Without a ``val`` folder, one image in so many is held out."""


def folder_files(folder: Path, split: str) -> list[tuple[Path, int]]:
    """Files of a split with their labels: the places of their class folders in order of names.

    Either ``folder`` holds ``train`` and ``val`` with the same class folders each, or it holds class folders (perhaps below
    ``train``), and every fifth file of a class in order of names, or its last if it has fewer, is held out.

    Raises:
        Refused: no such folder, fewer than two classes, a class without images, a class that only ``val`` has.
    """
    classes = class_names(folder)
    top = _training_folder(folder)
    separate = folder / "val"
    if separate.is_dir():
        unknown = [d.name for d in _subfolders(separate) if d.name not in classes]
        if unknown:
            raise Refused(f"class folder in {separate}", unknown[0], allowed=", ".join(classes))
        where = separate if split == "val" else top
        return [(path, label) for label, name in enumerate(classes) for path in images(where / name)]
    files = []
    for label, name in enumerate(classes):
        found = images(top / name)
        held_out = set(found[HELD_OUT - 1 :: HELD_OUT] or found[1:][-1:])
        files += [(path, label) for path in found if (path in held_out) == (split == "val")]
    return files


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, whose places are the labels."""
    if not folder.is_dir():
        raise Refused("data folder", str(folder), allowed="a folder that exists", fix="check the path")
    top = _training_folder(folder)
    classes = _subfolders(top)
    if len(classes) < 2:
        raise Refused(
            "data folder",
            str(top),
            allowed="a folder with a subfolder of images for each of two or more classes",
            fix="move the images of each class to a folder of its own",
        )
    empty = [d.name for d in classes if not images(d)]
    if empty:
        suffixes = " ".join(sorted(IMAGE_SUFFIXES))
        raise Refused(f"class folder {top / empty[0]} holds no image", allowed=suffixes, fix="add images or remove it")
    return [d.name for d in classes]


def images(folder: Path) -> list[Path]:
    """Image files of one class, in order of names; none if the folder is not there."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith("."))


def _training_folder(folder: Path) -> Path:
    if (folder / "train").is_dir():
        return folder / "train"
    if (folder / "val").is_dir():
        raise Refused(
            f"data folder {folder} has val but no train", fix="add train, or name the folder of classes itself"
        )
    return folder


def _subfolders(folder: Path) -> list[Path]:
    return sorted(d for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))


def unpacked(folder: Path, archive: str | None) -> Path:
    """The image folder inside ``archive``, which is unpacked beside itself on first use; without one, ``folder``."""
    if archive is None:
        return folder
    target = folder / "unpacked"
    if not target.is_dir():
        try:
            _unpack(folder / archive, target)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise Refused(f"archive {folder / archive} cannot be unpacked ({error})", fix="get another copy") from error
    inner = _subfolders(target)
    return inner[0] if len(inner) == 1 else target


def _unpack(archive: Path, target: Path) -> None:
    """Whole or not at all. Several processes may be at it: each unpacks for itself, the first to finish gives the name."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as partial, tarfile.open(archive) as tar:
        content = Path(partial) / "content"
        tar.extractall(content, filter="data")
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():
                raise
