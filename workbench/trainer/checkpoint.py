"""A run's whole state in one file: written atomically, loaded whole or not at all."""

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import Refused
from workbench.records.atomic import write_bytes

if TYPE_CHECKING:
    from workbench.trainer.loop import Trainer

FORMAT = "workbench-checkpoint-1"


def save(trainer: "Trainer", path: Path) -> None:
    """Write weights, optimizer, loss scale, data position, random state and counters to ``path``.

    Raises:
        Refused: a weight is not finite; the checkpoint before it is worth more and stays.
    """
    bad = [name for name, p in trainer.model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise Refused(
            f"checkpoint of a run with non-finite weights ({bad[0]} and {len(bad) - 1} more)",
            fix="go back to an earlier one",
        )
    state: dict[str, Any] = {
        "format": FORMAT,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "data": trainer.loader.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if trainer.device.type == "cuda" else [],
        "step": trainer.step,
        "updates": trainer.updates,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(path, buffer.getvalue())


def load(trainer: "Trainer", path: Path) -> None:
    """Put a saved state into a run of the same configuration.

    Raises:
        Refused: not a checkpoint, a torn one, or one of another model; the trainer is then unchanged.
    """
    try:
        state = torch.load(path, map_location=trainer.device, weights_only=True)
    except FileNotFoundError:
        raise Refused("checkpoint", str(path), allowed="a file that exists") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise Refused(
            "checkpoint",
            str(path),
            allowed=f"a whole file ({str(error).splitlines()[0][:120]})",
            fix="use an earlier one",
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Refused("checkpoint", str(path), allowed=f"a file in the format {FORMAT}")
    shapes = {name: tuple(value.shape) for name, value in trainer.model.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in state["model"].items()}
    if shapes != saved:
        other = sorted(set(shapes.items()) ^ set(saved.items()))[0]
        raise Refused(
            "checkpoint", str(path), allowed="one of the same model", fix=f"first difference: {other[0]} {other[1]}"
        )
    if trainer.scaler.enabled and not state["scaler"]:
        raise Refused("checkpoint", str(path), allowed="one with a loss scale, since this run scales its loss")
    trainer.loader.load_state_dict(state["data"])
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.scaler.enabled:
        trainer.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"].cpu())
    if state["random_cuda"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in state["random_cuda"]])
    trainer.step, trainer.updates = state["step"], state["updates"]
