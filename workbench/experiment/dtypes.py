"""The dtypes that operators really compute in on a device, asked of a child process so that the caller loads no torch."""

import json
import subprocess
import sys
from dataclasses import dataclass

from workbench.hardware.facts import worker_environment

TIMEOUT_S = 180
CUDA_AUTOCAST = {
    "linear": "float16",
    "matmul": "float16",
    "conv2d": "float16",
    "softmax": "float32",
    "log_softmax": "float32",
    "layer_norm": "float32",
    "sum": "float32",
    "exp": "float32",
    "pow": "float32",
    "nll_loss": "float32",
    "gelu": "float16",
}
"""What a CUDA autocast region computes in, of half-precision inputs: "CUDA Ops that can autocast to float16" and "to float32"
in PyTorch's documentation of ``torch.amp``; gelu is in neither list and follows its input."""


@dataclass(frozen=True)
class Way:
    """One way of asking for attention in fp32, and what came of it.

    ``operators`` maps the operators inside the attention modules to the dtypes of their inputs.
    """

    name: str
    operators: dict[str, list[str]]
    holds: bool


@dataclass(frozen=True)
class DtypesSeen:
    """``autocast``: by operator, the dtype that it gives in a half-precision region on this device, for half inputs."""

    device: str
    half: str
    ways: list[Way]
    autocast: dict[str, str]


def dtypes_seen(device: str = "auto") -> DtypesSeen:
    """One forward of a small ViT for each way of keeping its attention in fp32, and every operator alone.

    Raises:
        RuntimeError: the child process failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "workbench.experiment.dtype_probe", device]
    done = subprocess.run(
        command, env=worker_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the dtype probe failed ({done.returncode}): {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return DtypesSeen(**{**answer, "ways": [Way(**way) for way in answer["ways"]]})
