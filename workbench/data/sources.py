"""What a data name stands for, known before anything starts and without torch."""

import importlib.util
import math
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from workbench.data.manifest import Manifest, data_folder, manifest_names, read_manifest
from workbench.errors import Refused, nearest

SYNTHETIC = re.compile(r"synthetic(?::(?P<c>\d+)x(?P<h>\d+)x(?P<w>\d+):(?P<classes>\d+)(?::(?P<samples>\d+))?)?")
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"})


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
    synthetic: bool = False
    manifest_sha256: str = ""


def check_source(name: str) -> SourceInfo:
    """What ``name`` stands for.

    Args:
        name: a manifest's name, the path of an image folder, ``synthetic``, or ``synthetic:CxHxW:CLASSES[:SAMPLES]``.

    Raises:
        Refused: unknown name, missing or wrong files.
    """
    if name.startswith("synthetic"):
        return _synthetic(name)
    if name in manifest_names():
        return _from_manifest(read_manifest(name))
    if "/" in name or Path(name).is_dir():
        return image_folder(Path(name))
    raise Refused(
        "data",
        name,
        allowed="a manifest's name, a folder of images, or 'synthetic'",
        fix=nearest(name, [*manifest_names(), "synthetic"]),
    )


def digits_file() -> Path:
    """scikit-learn's own copy of the digits, found without importing it."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _from_manifest(manifest: Manifest) -> SourceInfo:
    if manifest.reader == "digits":
        manifest.files[0].verify(digits_file())
        folder = digits_file().parent
    else:
        folder = data_folder() / manifest.name
        for file in manifest.files:
            file.verify(folder / file.name)
    return SourceInfo(
        name=manifest.name,
        kind=manifest.reader,
        num_classes=manifest.num_classes,
        image_shape=manifest.image_shape,
        num_train=manifest.num_train,
        num_val=manifest.num_val,
        folder=folder,
        manifest_sha256=manifest.sha256,
    )


def image_folder(folder: Path) -> SourceInfo:
    """A folder with one subfolder per class, either directly or below ``train`` and ``val``."""
    if not folder.is_dir():
        raise Refused("data folder", str(folder), allowed="a folder that exists", fix="check the path")
    train = folder / "train" if (folder / "train").is_dir() else folder
    classes = [d for d in sorted(train.iterdir()) if d.is_dir()]
    counts = [len(images(d)) for d in classes]
    if len(classes) < 2 or not all(counts):
        raise Refused(
            "data folder", str(train), allowed="two or more class folders with images", fix="one subfolder per class"
        )
    has_val = (folder / "val").is_dir()
    num_val = (
        sum(len(images(d)) for d in (folder / "val").iterdir() if d.is_dir())
        if has_val
        else sum(c // 5 for c in counts)
    )
    num_train = sum(counts) if has_val else sum(counts) - num_val
    return SourceInfo(
        name=str(folder),
        kind="imagefolder",
        num_classes=len(classes),
        image_shape=(3, 224, 224),
        num_train=num_train,
        num_val=num_val,
        folder=folder,
    )


def images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)


def _synthetic(name: str) -> SourceInfo:
    match = SYNTHETIC.fullmatch(name)
    numbers = {k: int(v) for k, v in match.groupdict().items() if v is not None} if match else {"c": 0}
    if not all(numbers.values()):
        raise Refused(
            "synthetic data",
            name,
            allowed="synthetic or synthetic:CxHxW:CLASSES[:SAMPLES]",
            fix="synthetic:3x224x224:1000",
        )
    shape = (numbers.get("c", 3), numbers.get("h", 32), numbers.get("w", 32))
    # Held in memory as fp32: by default no more than a quarter of a GiB.
    samples = numbers.get("samples", max(min(4096, 2**26 // math.prod(shape)), 64))
    return SourceInfo(
        name=name,
        kind="synthetic",
        num_classes=numbers.get("classes", 10),
        image_shape=shape,
        num_train=samples,
        num_val=max(samples // 5, 1),
        synthetic=True,
    )
