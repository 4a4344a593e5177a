"""What a data name stands for, known before anything starts and without torch."""

import importlib.util
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workbench.data.folders import class_names, folder_files
from workbench.data.integrity import verify_files
from workbench.data.manifest import Manifest, data_folder, manifest_names, read_manifest
from workbench.errors import Refused, nearest

SPLITS = ("train", "val")
SYNTHETIC = re.compile(r"synthetic(?::(?P<c>\d+)x(?P<h>\d+)x(?P<w>\d+):(?P<classes>\d+)(?::(?P<samples>\d+))?)?")
SYNTHETIC_SAMPLES = 4096


class SourceInfo(BaseModel):
    """Shape and size of a data set. ``image_shape`` is channels, height, width."""

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    """``digits``, ``cifar10``, ``imagefolder`` or ``synthetic``."""
    num_classes: int
    image_shape: tuple[int, int, int]
    num_train: int
    num_val: int
    folder: Path | None = None
    archive: str | None = None
    """The one file in ``folder`` that holds all images, where there is one."""
    synthetic: bool = False
    manifest_sha256: str = ""
    """Of the manifest that vouches for the files; empty where none does."""


def check_source(name: str) -> SourceInfo:
    """What ``name`` stands for.

    Args:
        name: a manifest's name, the path of an image folder, ``synthetic``, or ``synthetic:CxHxW:CLASSES[:SAMPLES]``.

    Raises:
        Refused: unknown name, missing or wrong files.
    """
    if name == "synthetic" or name.startswith("synthetic:"):
        return _synthetic(name)
    if name in manifest_names():
        return _from_manifest(read_manifest(name))
    folder = Path(name).expanduser()
    if "/" in name or (name and folder.is_dir()):
        return _image_folder(name, folder)
    raise Refused(
        "data",
        name,
        allowed="a manifest's name, the path of an image folder, or 'synthetic'",
        fix=nearest(name, [*manifest_names(), "synthetic"]),
    )


def source_folder(manifest: Manifest) -> Path:
    """Where the files of a manifest lie, or would lie."""
    if manifest.reader == "digits":
        return installed_datasets() / "data"
    return data_folder() / manifest.name


def installed_datasets() -> Path:
    """The folder of the data sets that scikit-learn ships, found without importing it."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise Refused("scikit-learn, which ships the digits and two photographs, is not installed", fix="install it")
    return Path(spec.origin).parent / "datasets"


def _from_manifest(manifest: Manifest) -> SourceInfo:
    folder = source_folder(manifest)
    verify_files(manifest, folder)
    return SourceInfo(
        name=manifest.name,
        kind=manifest.reader,
        num_classes=manifest.num_classes,
        image_shape=manifest.image_shape,
        num_train=manifest.num_train,
        num_val=manifest.num_val,
        folder=folder,
        archive=manifest.archive,
        manifest_sha256=manifest.sha256,
    )


def _image_folder(name: str, folder: Path) -> SourceInfo:
    num_classes = len(class_names(folder))
    counts = {split: len(folder_files(folder, split)) for split in SPLITS}
    if not counts["val"]:
        raise Refused(
            f"data folder {folder} has no image to validate on", fix="add images to val, or a second to a class"
        )
    return SourceInfo(
        name=name,
        kind="imagefolder",
        num_classes=num_classes,
        image_shape=(3, 224, 224),
        num_train=counts["train"],
        num_val=counts["val"],
        folder=folder,
    )


def _synthetic(name: str) -> SourceInfo:
    match = SYNTHETIC.fullmatch(name)
    numbers = {k: int(v) for k, v in match.groupdict().items() if v is not None} if match else {"c": 0}
    if not all(numbers.values()) or numbers.get("classes", 2) < 2:
        raise Refused(
            "synthetic data",
            name,
            allowed="synthetic, or synthetic:CxHxW:CLASSES[:SAMPLES] with numbers above 0 and two classes or more",
            fix="synthetic:3x224x224:1000",
        )
    samples = numbers.get("samples", SYNTHETIC_SAMPLES)
    return SourceInfo(
        name=name,
        kind="synthetic",
        num_classes=numbers.get("classes", 10),
        image_shape=(numbers.get("c", 3), numbers.get("h", 32), numbers.get("w", 32)),
        num_train=samples,
        num_val=max(samples // 5, 1),
        synthetic=True,
    )
