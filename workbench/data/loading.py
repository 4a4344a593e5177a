"""Batches in an order that depends on seed and epoch alone, and a position from which to go on at the exact sample."""

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from workbench.data.datasets import BatchedDataset
from workbench.data.randomness import drawing_from, stored_generators, stream_seed
from workbench.errors import Refused

Batch = tuple[Tensor, Tensor]
"""Images, float32 (N, C, H, W); labels, int64 (N)."""
BatchKey = tuple[int, Tensor]
"""Epoch, and the indices of a batch's samples."""


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = True,
) -> "Loader":
    """A loader of ``dataset``; see ``Loader``.

    Args:
        shuffle: draw the order of each epoch from (seed, epoch); otherwise the order of the data set.
        num_workers: processes that read; 0 reads in this one, which is best for data held in memory.
        drop_last: leave out the samples at an epoch's end that fill no batch.

    Raises:
        Refused: a batch larger than the data set, or a data set that worker processes cannot import.
    """
    num_samples = len(dataset)  # type: ignore[arg-type]
    if batch_size < 1 or (drop_last and batch_size > num_samples):
        raise Refused("batch size", batch_size, allowed=f"1 to {num_samples}, the samples of the data set")
    if num_workers < 0:
        raise Refused("num_workers", num_workers, allowed="0 or more")
    if num_workers and type(dataset).__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise Refused(
            f"data set {type(dataset).__name__} is defined in a notebook cell, which worker processes cannot import",
            fix="move it to a module, or set num_workers=0",
        )
    return Loader(dataset, BatchOrder(num_samples, batch_size, shuffle, seed, drop_last), num_workers)


@dataclass(frozen=True)
class BatchOrder:
    """Which samples are in which batch of which epoch."""

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def num_batches(self) -> int:
        """Batches in one epoch."""
        batches = self.num_samples / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def keys(self, epoch: int, position: int) -> Iterator[BatchKey]:
        """All batches from number ``position`` of ``epoch`` on, without end."""
        for current in itertools.count(epoch):
            samples = (
                epoch_order(self.num_samples, self.seed, current) if self.shuffle else torch.arange(self.num_samples)
            )
            for k in range(position if current == epoch else 0, self.num_batches):
                # A copy: a slice sent to a worker would take the whole epoch's order with it.
                yield current, samples[k * self.batch_size : (k + 1) * self.batch_size].clone()


class Loader:
    """Batches, epoch after epoch. ``for batch in loader`` is what is left of one epoch; ``next(loader)`` never ends.

    Worker processes live as long as the loader and read ahead over the ends of epochs. Random draws while a sample is read
    depend on (seed, epoch, index) alone, so the number of workers and a resume change nothing.

    Attributes:
        epoch, position: where the next batch is; ``position`` counts batches.
        skipped: readings of images that could not be decoded, where the data set was asked to skip them.
    """

    def __init__(self, dataset: Dataset[Any], order: BatchOrder, num_workers: int) -> None:
        self.dataset, self.order, self.num_workers = dataset, order, num_workers
        self.epoch, self.position, self.skipped = 0, 0, 0
        self._stream: Iterator[tuple[Batch | Refused, int]] | None = None

    def __len__(self) -> int:
        """Batches in one epoch."""
        return self.order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        self._enter_epoch()
        for _ in range(len(self) - self.position):
            yield next(self)

    def __next__(self) -> Batch:
        self._enter_epoch()
        if self._stream is None:
            self._stream = self._open_stream()
        batch, skipped = next(self._stream)
        if isinstance(batch, Refused):
            self.close()
            raise batch
        self.position += 1
        self.skipped += skipped
        return batch

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch, and what must be equal for it to mean the same samples."""
        return {"epoch": self.epoch, "position": self.position, **asdict(self.order)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            Refused: taken with another seed, order, batch size or number of samples.
        """
        differing = [f"{k} {state.get(k)} then, {v} now" for k, v in asdict(self.order).items() if state.get(k) != v]
        if differing:
            raise Refused(f"data position of another run ({', '.join(differing)})", fix="resume with the saved values")
        self.close()
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop the worker processes; the next batch starts them again."""
        self._stream = None

    def _enter_epoch(self) -> None:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def _open_stream(self) -> Iterator[tuple[Batch | Refused, int]]:
        # Neither may refer to this loader: in a cycle of references, workers are stopped by the garbage collector, which
        # may close their queues before they are told, and then waits seconds for each.
        reader, keys = _BatchReader(self.dataset, self.order.seed), self.order.keys(self.epoch, self.position)
        if not self.num_workers:
            return map(reader.__getitem__, keys)
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,  # a key is already a whole batch
            sampler=keys,
            num_workers=self.num_workers,
            collate_fn=_as_read,
            # Else the workers' base seed is drawn from the global generator, which shifts what the model draws next.
            generator=torch.Generator().manual_seed(self.order.seed),
            multiprocessing_context="spawn",
            pin_memory=torch.cuda.is_available(),
        )
        return iter(loader)


class _BatchReader(Dataset[tuple[Batch | Refused, int]]):
    """Reads whole batches, in this process or in a worker; with each, how many of its images were skipped.

    A refusal is returned, not raised, so that it arrives from a worker without a traceback around it.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.stored = stored_generators(dataset)

    def __getitem__(self, key: BatchKey) -> tuple[Batch | Refused, int]:
        epoch, indices = key
        if isinstance(self.dataset, BatchedDataset):
            return self.dataset.batch(indices), 0
        before = getattr(self.dataset, "skipped", 0)
        samples = []
        try:
            for index in indices.tolist():
                with drawing_from(stream_seed(self.seed, epoch, index), self.stored):
                    samples.append(self.dataset[index])
        except Refused as refusal:
            return refusal, 0
        images, labels = default_collate(samples)
        return (images, labels), getattr(self.dataset, "skipped", 0) - before


def _as_read(batch: Any) -> Any:
    return batch


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation of sample indices in one epoch."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(stream_seed(seed, epoch)))


def validation_batches(dataset: Dataset[Any], batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order, read in this process; the last batch may be smaller."""
    return iter(make_loader(dataset, batch_size, shuffle=False, drop_last=False))
