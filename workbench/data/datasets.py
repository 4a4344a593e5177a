"""Data sets of (image, label): float32 images of shape (C, H, W), integer labels."""

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from workbench.data.sources import SourceInfo, check_source, images
from workbench.errors import Refused

SPLITS = ("train", "val")
SPLIT_SEED = 0


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images held as one tensor; a whole batch is one indexing operation (``batch``)."""

    def __init__(self, images_NCHW: Tensor, labels_N: Tensor) -> None:
        self.images, self.labels = images_NCHW, labels_N

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class ImageFolderDataset(Dataset[tuple[Tensor, Tensor]]):
    """Files decoded on access, resized and centre-cropped to ``image_shape``.

    Args:
        skip_corrupt: count a file that cannot be decoded in ``skipped`` and give the next one instead of refusing it.
    """

    def __init__(
        self, files: list[tuple[Path, int]], image_shape: tuple[int, int, int], *, skip_corrupt: bool = False
    ) -> None:
        self.files, self.image_shape, self.skip_corrupt = files, image_shape, skip_corrupt
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        for step in range(len(self.files)):
            path, label = self.files[(index + step) % len(self.files)]
            try:
                return decode(path, self.image_shape), torch.tensor(label)
            except (OSError, SyntaxError, UnidentifiedImageError) as error:
                if not self.skip_corrupt:
                    raise Refused(
                        f"image {path} cannot be decoded ({error})", fix="replace or remove it, or ask for skip_corrupt"
                    ) from None
                self.skipped += 1
        raise Refused("image folder", allowed="at least one image that can be decoded")


def decode(path: Path, image_shape: tuple[int, int, int]) -> Tensor:
    """Shorter side to the target, centre crop, values normalised to about ±1."""
    channels, height, width = image_shape
    with Image.open(path) as opened:
        image = opened.convert("L" if channels == 1 else "RGB")
    factor = max(height / image.height, width / image.width)
    image = image.resize((max(round(image.width * factor), width), max(round(image.height * factor), height)))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32)
    return torch.from_numpy(pixels).view(height, width, channels).permute(2, 0, 1).contiguous() / 127.5 - 1.0


def open_dataset(name: str, split: str, *, skip_corrupt: bool = False) -> Dataset[tuple[Tensor, Tensor]]:
    """The ``train`` or ``val`` split of a source; see ``check_source`` for names."""
    if split not in SPLITS:
        raise Refused("split", split, allowed=" or ".join(SPLITS))
    info = check_source(name)
    if info.kind == "imagefolder":
        assert info.folder is not None
        return ImageFolderDataset(_folder_files(_unpacked(info), split), info.image_shape, skip_corrupt=skip_corrupt)
    readers: dict[str, Callable[[SourceInfo, str], ArrayDataset]] = {
        "digits": _digits,
        "cifar10": _cifar10,
        "synthetic": _synthetic,
    }
    return readers[info.kind](info, split)


def _digits(info: SourceInfo, split: str) -> ArrayDataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    train, val = train_test_split(
        np.arange(len(data.target)), test_size=info.num_val, random_state=SPLIT_SEED, stratify=data.target
    )
    chosen = np.sort(train if split == "train" else val)
    pixels = torch.from_numpy(data.images[chosen]).float().unsqueeze(1) / 8.0 - 1.0
    return ArrayDataset(pixels, torch.from_numpy(data.target[chosen]).long())


def _synthetic(info: SourceInfo, split: str) -> ArrayDataset:
    """Made-up images: noise around a level that tells the class. For speed; no accuracy on it means anything."""
    size = info.num_train if split == "train" else info.num_val
    generator = torch.Generator().manual_seed(SPLITS.index(split))
    labels = torch.arange(size) % info.num_classes
    levels = (labels / info.num_classes).view(-1, 1, 1, 1)
    return ArrayDataset(torch.randn(size, *info.image_shape, generator=generator) + levels, labels)


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's batches are pickles; this reads arrays and nothing that could run code."""

    ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED:
            return getattr(np, name)
        if name == "_reconstruct" and module in {"numpy.core.multiarray", "numpy._core.multiarray"}:
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a data file")


def _cifar10(info: SourceInfo, split: str) -> ArrayDataset:
    assert info.folder is not None
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    pixels, labels = [], []
    with tarfile.open(info.folder / "cifar-10-python.tar.gz") as archive:
        for name in names:
            member = archive.extractfile(f"cifar-10-batches-py/{name}")
            assert member is not None
            batch = _ArraysOnly(io.BytesIO(member.read()), encoding="bytes").load()
            pixels.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
            labels.append(torch.tensor(batch[b"labels"]))
    return ArrayDataset(torch.cat(pixels).float() / 127.5 - 1.0, torch.cat(labels))


def _unpacked(info: SourceInfo) -> Path:
    """The image folder itself; a manifest's verified archive is unpacked beside itself on first use."""
    assert info.folder is not None
    archives = sorted(info.folder.glob("*.tgz"))
    if not archives:
        return info.folder
    target = info.folder / "unpacked"
    if not target.is_dir():
        partial = info.folder / ".unpacking"
        with tarfile.open(archives[0]) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(target)
    inner = [d for d in target.iterdir() if d.is_dir()]
    return inner[0] if len(inner) == 1 else target


def _folder_files(folder: Path, split: str) -> list[tuple[Path, int]]:
    """Files with labels. Without a ``val`` folder every fifth file of a class, in order of names, is held out."""
    separate = (folder / "train").is_dir() and (folder / "val").is_dir()
    top = folder / "train" if (folder / "train").is_dir() else folder
    files = []
    for label, name in enumerate(sorted(d.name for d in top.iterdir() if d.is_dir())):
        if separate:
            files += [(path, label) for path in images(folder / split / name)]
        else:
            held_out = split == "val"
            files += [(path, label) for k, path in enumerate(images(top / name)) if (k % 5 == 4) == held_out]
    return files
