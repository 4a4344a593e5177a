"""What a result depends on besides its parameters: code, packages, machine."""

import functools
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.records.record import hostname

PACKAGES = ("torch", "numpy", "triton", "timm", "transformers", "papermill", "ipykernel")
HERE = Path(__file__).parent


def collect() -> dict[str, Any]:
    """Facts for ``run.json``; each costs milliseconds, and one that cannot be had is left out."""
    facts: dict[str, Any] = {
        "workbench": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": hostname(),
        "packages": {name: found for name in PACKAGES if (found := _installed(name))},
    }
    commit = _output("git", "-C", str(HERE), "rev-parse", "HEAD")
    if commit:
        facts |= {
            "git_commit": commit,
            "git_dirty": bool(_output("git", "-C", str(HERE), "status", "--porcelain", "-uno")),
        }
    gpus = _gpus()
    return facts | ({"gpus": gpus} if gpus else {})


@functools.cache
def _gpus() -> list[str]:
    """Name, driver and power cap of each NVIDIA GPU, as ``nvidia-smi`` prints them."""
    if shutil.which("nvidia-smi") is None:
        return []
    said = _output("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader")
    return [line.strip() for line in said.splitlines() if line.strip()]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
