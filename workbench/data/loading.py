"""Batches in an order that depends on seed and epoch alone, and a position from which to go on at the exact sample."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from workbench.data.datasets import ArrayDataset

Batch = tuple[Tensor, Tensor]


class Loader:
    """An endless stream of batches of exactly ``batch_size`` training samples, epoch after epoch.

    The order of an epoch is a permutation drawn from (seed, epoch). Samples left over at an epoch's end that fill no batch
    are dropped, as is usual in training. ``state_dict`` names the next batch.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, *, seed: int = 0, num_workers: int = 0) -> None:
        self.dataset, self.batch_size, self.seed, self.num_workers = dataset, batch_size, seed, num_workers
        self.length = len(dataset)  # type: ignore[arg-type]
        assert batch_size <= self.length, f"batch_size {batch_size} exceeds the {self.length} samples there are"
        self.epoch, self.position = 0, 0
        self._batches: Iterator[Batch] | None = None

    @property
    def batches_per_epoch(self) -> int:
        return self.length // self.batch_size

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self.position >= self.batches_per_epoch:
            self.epoch, self.position, self._batches = self.epoch + 1, 0, None
        if self._batches is None:
            self._batches = self._rest_of_epoch()
        batch = next(self._batches)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if (state["seed"], state["batch_size"]) != (self.seed, self.batch_size):
            raise ValueError(f"data position {state} was saved with another seed or batch size")
        self.epoch, self.position, self._batches = state["epoch"], state["position"], None

    def _rest_of_epoch(self) -> Iterator[Batch]:
        order = epoch_order(self.length, self.seed, self.epoch)
        used = order[self.position * self.batch_size : self.batches_per_epoch * self.batch_size]
        chunks = used.split(self.batch_size)
        if isinstance(self.dataset, ArrayDataset):
            return iter(self.dataset.batch(chunk) for chunk in chunks)
        # A generator of its own: the workers' seeds then depend on seed and epoch, not on what else drew random numbers.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        context = "spawn" if self.num_workers else None
        return iter(
            DataLoader(
                self.dataset,
                batch_sampler=[chunk.tolist() for chunk in chunks],
                num_workers=self.num_workers,
                generator=generator,
                multiprocessing_context=context,
                pin_memory=torch.cuda.is_available(),
            )
        )


def epoch_order(length: int, seed: int, epoch: int) -> Tensor:
    """The permutation of sample indices in one epoch."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def validation_batches(dataset: Dataset[Any], batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order; the last batch may be smaller."""
    chunks = torch.arange(len(dataset)).split(batch_size)  # type: ignore[arg-type]
    if isinstance(dataset, ArrayDataset):
        return iter(dataset.batch(chunk) for chunk in chunks)
    return iter(DataLoader(dataset, batch_size=batch_size))
