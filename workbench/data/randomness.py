"""Random draws of samples: a function of (seed, epoch, sample), so that workers, prefetching and resuming cannot change them."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def stream_seed(*key: int) -> int:
    """63 well-mixed bits named by integers such as (seed, epoch, index): neighbouring keys give unrelated streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stored_generators(owner: object, depth: int = 4) -> list[Generator]:
    """Generators that ``owner`` keeps in its attributes, or in those of its transforms, down to ``depth`` levels.

    A spawned worker gets a copy of each in the same state; unless they are reseeded, every worker and every epoch draws the
    same numbers. One hidden in a closure is not found.
    """
    found: dict[int, Generator] = {}

    def visit(value: object, levels: int) -> None:
        if isinstance(value, Generator):
            found[id(value)] = value
        elif levels and not isinstance(value, Tensor | np.ndarray | type | ModuleType):
            # Long sequences are lists of files or labels, not transforms.
            if isinstance(value, list | tuple) and len(value) <= 64:
                children: Iterable[object] = value
            elif isinstance(value, Mapping) and len(value) <= 64:
                children = value.values()
            else:
                children = getattr(value, "__dict__", {}).values()
            for child in list(children):
                visit(child, levels - 1)

    visit(owner, depth)
    return list(found.values())


@contextmanager
def drawing_from(seed: int, stored: Iterable[Generator]) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global generators and the ``stored`` ones; the global ones get their state back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: that reseeds every GPU as well.
    torch.default_generator.manual_seed(seed)
    for place, generator in enumerate(stored):
        # Each its own seed: two transforms must not draw the same numbers.
        _reseed(generator, stream_seed(seed, place))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _reseed(generator: Generator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed % 2**32)


def _generator_from(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _by_value(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    return _generator_from, (str(generator.device), generator.get_state().numpy().tobytes())


# torch would hand a generator's state to a spawned worker in shared memory that is freed before the worker starts: two
# generators on one data set, and the worker cannot start ("bad value(s) in fds_to_keep").
ForkingPickler.register(torch.Generator, _by_value)


@dataclass(frozen=True)
class DrawReport:
    """Whether random samples drew afresh. ``repeated_*`` count samples whose draws an earlier sample had already had."""

    num_samples: int
    random: bool
    """False when every reading of the sample was the same, so that there are no draws to judge."""
    repeated_in_epoch: int
    repeated_across_epochs: int

    @property
    def faulty(self) -> bool:
        return self.random and bool(self.repeated_in_epoch or self.repeated_across_epochs)


class _SameSample(Dataset[Any]):
    """One sample of a data set under many indices: what differs between readings is then random draws alone."""

    def __init__(self, dataset: Dataset[Any], length: int) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        return self.dataset[0]


def check_draws(
    dataset: Dataset[Any], make_loader: Callable[[Dataset[Any]], Iterable[Any]], *, num_samples: int = 16
) -> DrawReport:
    """Read one sample ``num_samples`` times in each of two epochs and look for draws that came twice.

    Args:
        make_loader: builds the loader under test; iterating it once is one epoch of (images, labels) batches.
    """
    loader = make_loader(_SameSample(dataset, num_samples))
    epochs = [[image.numpy().tobytes() for images, _ in loader for image in images] for _ in range(2)]
    first, second = map(set, epochs)
    return DrawReport(
        num_samples=num_samples,
        random=len(first | second) > 1,
        repeated_in_epoch=sum(len(read) - len(set(read)) for read in epochs),
        repeated_across_epochs=len(first & second),
    )
