"""A run's whole state in one file: written atomically, loaded whole or not at all."""

import io
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import Refused
from workbench.models.finite import nonfinite_weights
from workbench.records.atomic import write_bytes

if TYPE_CHECKING:
    from workbench.trainer.loop import Trainer

FORMAT = "workbench-checkpoint-3"
KEYS = {"format", "config", "model", "optimizer", "scaler", "data", "random", "random_cuda", "step", "updates"}
MAY_DIFFER = {"steps", "device", "micro_batch", "num_workers", "compile"}
"""Fields of the configuration that say how or how long a run goes on, not what it computes."""


def save(trainer: "Trainer", path: Path) -> None:
    """Write weights, optimizer, loss scale, data position, random state and counters to ``path``.

    Raises:
        Refused: a weight is not finite; the checkpoint before it is worth more and stays.
    """
    bad = nonfinite_weights(trainer.model)
    if bad:
        raise Refused(
            f"checkpoint of a run with non-finite weights ({bad[0]} and {len(bad) - 1} more)",
            fix="go back to an earlier one",
        )
    cuda = trainer.device.type == "cuda"
    state: dict[str, Any] = {
        "format": FORMAT,
        "config": trainer.config.model_dump(mode="json"),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "data": trainer.loader.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(trainer.device) if cuda else None,
        "step": trainer.step,
        "updates": trainer.updates,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())


def load(trainer: "Trainer", path: Path) -> None:
    """Put a saved state into a run of the same configuration; the fields of ``MAY_DIFFER`` may differ.

    Raises:
        Refused: not a checkpoint, a damaged one, or one of another run; the trainer is then unchanged.
    """
    state = _read(path)
    _check_fits(trainer, state, path)
    trainer.loader.load_state_dict(state["data"])
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if trainer.device.type == "cuda" and state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"], trainer.device)
    trainer.step, trainer.updates = state["step"], state["updates"]


def _read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, every byte of it checked."""
    try:
        # torch.load does not look at the checksums that torch.save wrote: a flipped bit would come in as a weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Refused("checkpoint", str(path), allowed="a file that exists") from None
    except Exception as error:  # a damaged or foreign file can raise nearly anything in the readers
        reason = str(error).partition("\n")[0][:120]
        raise Refused("checkpoint", str(path), allowed=f"a whole file ({reason})", fix="use an earlier one") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or set(state) != KEYS:
        raise Refused("checkpoint", str(path), allowed=f"a file in the format {FORMAT}")
    return state


def _check_fits(trainer: "Trainer", state: dict[str, Any], path: Path) -> None:
    """Everything that could fail in the middle of loading, tried before the first change."""
    now, then = trainer.config.model_dump(mode="json"), state["config"]
    differing = [f"{k} {then.get(k)} then, {v} now" for k, v in now.items() if k not in MAY_DIFFER and then.get(k) != v]
    if differing:
        raise Refused(
            "checkpoint",
            str(path),
            allowed=f"one of the same configuration ({', '.join(differing)})",
            fix="resume with the saved values",
        )
    shapes = {name: tuple(value.shape) for name, value in trainer.model.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in state["model"].items()}
    if shapes != saved:
        name, shape = sorted(set(shapes.items()) ^ set(saved.items()))[0]
        raise Refused("checkpoint", str(path), allowed="one of the same model", fix=f"first difference: {name} {shape}")
    groups, saved_groups = (
        [len(g["params"]) for g in o["param_groups"]] for o in (trainer.optimizer.state_dict(), state["optimizer"])
    )
    if groups != saved_groups:
        raise Refused(
            "checkpoint", str(path), allowed=f"one that trains as many tensors ({saved_groups} then, {groups} now)"
        )
    if trainer.scaler.enabled and not state["scaler"]:
        raise Refused("checkpoint", str(path), allowed="one with a loss scale, since this run scales its loss")
