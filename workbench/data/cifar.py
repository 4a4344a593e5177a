"""CIFAR-10's Python batches, read from the archive as published, without letting the pickles in it run code."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import Refused

MEMBERS = {"train": [f"data_batch_{k}" for k in range(1, 6)], "val": ["test_batch"]}


class _ArraysOnly(pickle.Unpickler):
    """Allows what a pickled array of numbers is made of; no name in a pickle reaches anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in {"ndarray", "dtype"}:
            return getattr(np, name)
        # The same function moved between NumPy 1 and 2; the published files name the old place.
        if name == "_reconstruct" and module in {"numpy.core.multiarray", "numpy._core.multiarray"}:
            return np.ndarray.__reduce__(np.empty(0))[0]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a data file")


def read_batches(archive: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, uint8 (N, 3, 32, 32), and labels, int64 (N).

    Raises:
        Refused: the archive is damaged, or holds something other than arrays.
    """
    pixels, labels = [], []
    try:
        with tarfile.open(archive) as tar:
            for name in MEMBERS[split]:
                member = tar.extractfile(f"cifar-10-batches-py/{name}")
                if member is None:
                    raise KeyError(f"{name} is not a file")
                batch = _ArraysOnly(io.BytesIO(member.read()), encoding="bytes").load()
                pixels.append(np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
                labels.append(np.asarray(batch[b"labels"], dtype=np.int64))
    except (tarfile.TarError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"{archive} cannot be read as CIFAR-10 ({error})", fix="delete it and run `workbench data fetch cifar10`"
        ) from error
    return np.concatenate(pixels), np.concatenate(labels)
