"""Data sets with planted faults. In a module, since worker processes import them."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class StoredGenerator(Dataset[tuple[Tensor, int]]):
    """The fault: a NumPy generator made once and kept. Every worker gets a copy of it in the same state."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.generator.random((1, 2, 2), dtype=np.float32)), index


class Jitter:
    """A transform with generators of its own, as a list of transforms holds several."""

    def __init__(self) -> None:
        self.legacy = np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __call__(self, image: Tensor) -> Tensor:
        return image + float(self.legacy.uniform()) + torch.rand((), generator=self.torch)


class GlobalDraws(Dataset[tuple[Tensor, int]]):
    """Healthy: draws from the global generators, and through transforms."""

    def __init__(self) -> None:
        self.transforms = [Jitter(), Jitter()]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.full((1, 2, 2), float(index)) + torch.rand(1, 2, 2) + float(np.random.uniform())
        for transform in self.transforms:
            image = transform(image)
        return image, index
