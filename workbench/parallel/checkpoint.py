"""A run's state on many ranks: written while training goes on, whole or not at all, and loaded on as many ranks as there are.

A checkpoint is a folder ``step-00000120``. It is written under a hidden name and renamed when every rank's files are on disk and
``manifest.json`` names them with their sizes and checksums; a folder that does not match its manifest is no checkpoint.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from workbench.errors import Refused
from workbench.models.finite import nonfinite_weights
from workbench.records.atomic import write_json

FORMAT = "workbench-distributed-checkpoint-1"
MANIFEST, STATE = "manifest.json", "state.json"
READ = 2**24


class Stateful(Protocol):
    """What a loss scaler and a data loader are here: a small state that JSON can hold, the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass
class RunState:
    """All that a run is at one moment.

    Attributes:
        parts: loss scaler, data position and the like, by name.
        counters: such as ``step``; replaced as a whole on loading.
        identity: what must be equal for a checkpoint to be of the same run.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: dict[str, Stateful] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run in ``folder``. Every method is called by all ranks together.

    Args:
        keep: how many whole checkpoints stay; older ones are deleted after a newer one is whole.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        # A group of its own: the writing thread's exchanges must not meet those of the training in between.
        self._group = dist.new_group(backend="gloo")
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._random_of_absent: dict[str, Tensor] = {}
        if self._rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover)
        self._barrier()

    def save(self, state: RunState) -> None:
        """Copy the state to host memory and write it in the background. Waits for the save before this one.

        Raises:
            Refused: a weight is not finite on some rank; nothing is written, and the checkpoints there stay.
        """
        self.wait()
        self._check_finite(state.model)
        name = self._from_first(self._free_name(state.counters["step"]))
        hidden = self.folder / f".{name}"
        if self._rank == 0:
            hidden.mkdir()
            write_json(hidden / STATE, self._small_state(state))
        self._barrier()
        written = dcp.async_save(
            _large_state(state) | {"random": self._random_state()},
            storage_writer=dcp.FileSystemWriter(hidden, sync_files=True),
            process_group=self._group,
        )
        assert isinstance(written, Future)
        self._pending = self._thread.submit(self._complete, written, hidden, self.folder / name)

    def wait(self) -> None:
        """Until the save in progress is a whole checkpoint.

        Raises:
            CheckpointException, OSError: it could not be written. The checkpoints before it stay.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, state: RunState) -> int | None:
        """Go on from the newest whole checkpoint; its step, or ``None`` where there is none.

        Raises:
            Refused: it belongs to another run; the state is then unchanged.
        """
        self.wait()
        for name in self._from_first([path.name for path in self._all()][::-1]):
            path = self.folder / name
            if self._is_whole(path):
                self._load(state, path)
                return state.counters["step"]
            if self._rank == 0:  # out of the way, or it would count among those to keep
                shutil.rmtree(self.folder / f"torn-{name}", ignore_errors=True)
                path.rename(self.folder / f"torn-{name}")
        return None

    def close(self) -> None:
        """Finish the save in progress and stop the writing thread."""
        self.wait()
        self._thread.shutdown()

    def _complete(self, written: "Future[Any]", hidden: Path, final: Path) -> None:
        """In the writing thread: when all files are there, the first rank gives the folder its manifest and its name."""
        written.result()
        files = sorted(p.name for p in hidden.iterdir())[self._rank :: self._world]
        sums = self._gather({name: _checksum(hidden / name) for name in files})
        failure = ""
        if self._rank == 0:
            try:
                merged = {name: entry for part in sums for name, entry in part.items()}
                write_json(hidden / MANIFEST, {"format": FORMAT, "files": merged})
                hidden.rename(final)
                _sync_folder(self.folder)
                self._rotate()
            except OSError as error:
                failure = str(error)
        if failure := self._from_first(failure):
            raise OSError(f"checkpoint {final.name} could not be completed: {failure}")

    def _rotate(self) -> None:
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old)

    def _all(self) -> list[Path]:
        """Whole or not, by step and attempt."""
        return sorted(self.folder.glob("step-*"))

    def _free_name(self, step: int) -> str:
        """A second one of the same step goes after the first: to replace it takes two renames, and a kill in between both."""
        name = f"step-{step:08d}"
        taken = [path.suffix for path in self._all() if path.stem == name]
        return name if not taken else f"{name}.{1 + int(taken[-1][1:] or 0):03d}"

    def _is_whole(self, path: Path) -> bool:
        """Whether every file has the size and checksum that the manifest says; each rank reads its share."""
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
            files = dict(sorted(manifest["files"].items()))
            whole = manifest["format"] == FORMAT and STATE in files and ".metadata" in files
            mine = list(files)[self._rank :: self._world]
            whole = whole and all(files[name] == _checksum(path / name) for name in mine)
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        return all(self._gather(whole))

    def _load(self, state: RunState, path: Path) -> None:
        small = json.loads((path / STATE).read_bytes())
        large = _large_state(state)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        _check_fits(state, large, small, saved, path)
        ranks = range(small["world"])
        random = {f"{kind}.{rank}": torch.empty_like(s) for kind, s in _random().items() for rank in ranks}
        random = {name: value for name, value in random.items() if f"random.{name}" in saved}
        # Tensors are loaded in place, other values into the dictionaries given.
        dcp.load(large | {"random": random}, checkpoint_id=path, process_group=self._group)
        set_state_dict(
            state.model, state.optimizer, model_state_dict=large["model"], optim_state_dict=large["optimizer"]
        )
        for name, part in state.parts.items():
            part.load_state_dict(small["parts"][name])
        state.counters = small["counters"]
        self._set_random(random)

    def _small_state(self, state: RunState) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in state.parts.items()}
        return {
            "world": max([self._world, *(1 + int(name.partition(".")[2]) for name in self._random_of_absent)]),
            "counters": state.counters,
            "parts": parts,
            "identity": state.identity,
        }

    def _random_state(self) -> dict[str, Tensor]:
        """This rank's generators, and on the first rank those of ranks that a larger run had, for when it comes back."""
        mine = {f"{kind}.{self._rank}": value for kind, value in _random().items()}
        return mine | (self._random_of_absent if self._rank == 0 else {})

    def _set_random(self, saved: dict[str, Tensor]) -> None:
        self._random_of_absent = {
            name: value for name, value in saved.items() if int(name.partition(".")[2]) >= self._world
        }
        for kind in _random():
            if (value := saved.get(f"{kind}.{self._rank}")) is not None:
                _set_generator(kind, value)
            elif (first := saved.get(f"{kind}.0")) is not None:
                # A rank that the saved run had not: a stream of its own, the same at every attempt.
                seed = hashlib.sha256(first.numpy().tobytes() + str(self._rank).encode()).digest()
                _seed_generator(kind, int.from_bytes(seed[:7]))

    def _check_finite(self, model: nn.Module) -> None:
        bad = sorted({name for names in self._gather(nonfinite_weights(model)) for name in names})
        if bad:
            raise Refused(
                f"checkpoint of a run with non-finite weights ({bad[0]} and {len(bad) - 1} more)",
                fix="go back to an earlier one",
            )

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _from_first(self, value: Any) -> Any:
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def _barrier(self) -> None:
        dist.barrier(group=self._group)


def _large_state(state: RunState) -> dict[str, Any]:
    fresh = not state.optimizer.state
    model, optimizer = get_state_dict(state.model, state.optimizer)
    if fresh:  # it made the optimizer take a step of nothing, to see what it keeps; to have kept zeros is to be fresh
        for value in (v for entry in state.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)):
            value.zero_()
        state.optimizer.state.clear()
    return {"model": model, "optimizer": optimizer}


def _check_fits(state: RunState, large: dict[str, Any], small: dict[str, Any], saved: Any, path: Path) -> None:
    """Everything that could fail in the middle of loading, before the first change."""
    now, then = state.identity, small["identity"]
    differing = [f"{k} {then.get(k)} then, {now.get(k)} now" for k in {**then, **now} if then.get(k) != now.get(k)]
    if differing:
        raise Refused(
            "checkpoint",
            str(path),
            allowed=f"one of the same configuration ({', '.join(differing)})",
            fix="resume with the saved values, or start in an empty folder",
        )
    if missing := set(state.parts) - set(small["parts"]):
        raise Refused("checkpoint", str(path), allowed=f"one with a state for {sorted(missing)[0]!r}")
    shapes = dict(_shapes("model", large["model"])) | dict(_shapes("optimizer.state", large["optimizer"]["state"]))
    kept = {
        name: tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith(("model.", "optimizer.state.")) and hasattr(entry, "size")
    }
    if shapes != kept:
        name, shape = sorted(set(shapes.items()) ^ set(kept.items()))[0]
        raise Refused("checkpoint", str(path), allowed="one of the same model", fix=f"first difference: {name} {shape}")


def _shapes(prefix: str, value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of the tensors in a nested state."""
    if isinstance(value, Tensor):
        yield prefix, tuple(value.shape)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _shapes(f"{prefix}.{key}", item)


def _random() -> dict[str, Tensor]:
    """States of the generators of this process, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator(kind: str, state: Tensor) -> None:
    torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state)


def _seed_generator(kind: str, seed: int) -> None:
    torch.default_generator.manual_seed(seed) if kind == "cpu" else torch.cuda.manual_seed(seed)


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(READ):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
