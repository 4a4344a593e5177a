"""Data sets of (image, label): float32 images of shape (C, H, W) with values in [0, 1], integer labels."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from workbench.data.cifar import read_batches
from workbench.data.folders import folder_files, unpacked
from workbench.data.imagefolder import ImageFolderDataset
from workbench.data.sources import SPLITS, SourceInfo, check_source
from workbench.errors import Refused

SPLIT_SEED = 0
"""Of the digits' split, as their manifest says."""
POOL_BYTES = 2**26
"""Noise images that a synthetic data set keeps: at most 64 MiB, however many samples it has."""


class BatchedDataset(Dataset[tuple[Tensor, int]]):
    """A data set in memory, without random draws, which gives a whole batch in one indexing operation."""

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, C, H, W) and labels (N) of the samples ``indices`` (N)."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        images, labels = self.batch(torch.tensor([index % len(self)]))
        return images[0], int(labels[0])


class ArrayDataset(BatchedDataset):
    """Images held as one tensor: normalised floats, or bytes (a quarter of the memory), which are normalised when read."""

    def __init__(self, images_NCHW: Tensor, labels_N: Tensor) -> None:
        self.images, self.labels = images_NCHW, labels_N

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = self.images[indices]
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        return images, self.labels[indices]


class SyntheticDataset(BatchedDataset):
    """Made-up images, noise around a level that tells the class; sample ``i`` is the same whenever it is read.

    For speed: no accuracy on them means anything. The noise repeats after ``len(self.noise)`` samples.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, num_samples: int, seed: int) -> None:
        self.num_classes, self.num_samples = num_classes, num_samples
        pool = max(1, min(num_samples, POOL_BYTES // (4 * int(np.prod(image_shape)))))
        # Kept to the lower half, so that adding a level of at most 1/2 stays in [0, 1].
        self.noise = torch.rand(pool, *image_shape, generator=torch.Generator().manual_seed(seed)).div_(2)

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        labels = indices % self.num_classes
        levels = labels.float() / (2 * self.num_classes)
        return self.noise[indices % len(self.noise)].add_(levels.view(-1, 1, 1, 1)), labels


def open_dataset(name: str, split: str, *, skip_corrupt: bool = False) -> Dataset[tuple[Tensor, int]]:
    """The ``train`` or ``val`` split of a source.

    Args:
        name: as ``check_source`` takes it.
        skip_corrupt: replace an image that cannot be decoded by the next one and count it, instead of refusing it.

    Raises:
        Refused: an unknown name or split; missing or wrong files.
    """
    if split not in SPLITS:
        raise Refused("split", split, allowed=" or ".join(SPLITS))
    info = check_source(name)
    if info.kind == "imagefolder":
        assert info.folder is not None
        files = folder_files(unpacked(info.folder, info.archive), split)
        return ImageFolderDataset(files, info.image_shape, skip_corrupt=skip_corrupt)
    readers: dict[str, Callable[[SourceInfo, str], BatchedDataset]] = {
        "digits": _digits,
        "cifar10": _cifar10,
        "synthetic": _synthetic,
    }
    return readers[info.kind](info, split)


def _digits(info: SourceInfo, split: str) -> ArrayDataset:
    """Split by us: the samples in random order within their class, one class after another; every fifth is held out."""
    assert info.folder is not None
    rows = np.loadtxt(info.folder / "digits.csv.gz", delimiter=",").astype(np.int64)
    labels = rows[:, -1]
    # RandomState, unlike default_rng, promises the same numbers in every version of NumPy.
    generator = np.random.RandomState(SPLIT_SEED)
    classes = [generator.permutation(np.flatnonzero(labels == label)) for label in range(info.num_classes)]
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.concatenate(classes)[::5]] = True
    chosen = torch.from_numpy(rows[held_out if split == "val" else ~held_out])
    # Pixels are 0 … 16.
    return ArrayDataset(chosen[:, :-1].float().view(-1, *info.image_shape) / 16, chosen[:, -1].clone())


def _cifar10(info: SourceInfo, split: str) -> ArrayDataset:
    assert info.folder is not None and info.archive is not None
    pixels, labels = read_batches(info.folder / info.archive, split)
    return ArrayDataset(torch.from_numpy(pixels), torch.from_numpy(labels))


def _synthetic(info: SourceInfo, split: str) -> SyntheticDataset:
    num_samples = info.num_train if split == "train" else info.num_val
    return SyntheticDataset(info.image_shape, info.num_classes, num_samples, seed=SPLITS.index(split))
