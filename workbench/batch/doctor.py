"""What this machine can run, and why not the rest. Nothing is loaded that a run would load; a child process asks torch."""

import importlib.util
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from workbench.batch.preflight import MIN_FREE_BYTES
from workbench.errors import Refused
from workbench.hardware.facts import cpu_count

EXTRAS = {
    "gpu": (("pynvml", "triton"), "energy meter and block-sparse kernels on NVIDIA GPUs"),
    "dali": (("nvidia.dali",), "decoding images on the GPU"),
    "slurm": (("submitit",), "submitting to Slurm"),
    "hf": (("transformers", "accelerate"), "models named hf:NAME"),
    "timm": (("timm", "torchvision"), "models named timm:NAME"),
}
"""Optional dependencies by the extra that brings them: modules, and what they are for."""


class Check(BaseModel):
    subject: str
    state: Literal["yes", "no", "trouble"]
    """``no`` is something that this machine lacks and a run may do without; ``trouble`` keeps every run from working."""
    detail: str
    fix: str = ""


def examine(root: Path) -> list[Check]:
    """All checks, the device's last since it may take seconds."""
    return [
        _python(),
        *(_package(name) for name in ("torch", "ipykernel", "papermill")),
        _disk(root),
        *_extras(),
        *_devices(),
    ]


def _python() -> Check:
    return Check(subject="Python", state="yes", detail=f"{platform.python_version()} on {platform.platform()}")


def _package(name: str) -> Check:
    try:
        return Check(subject=name, state="yes", detail=version(name))
    except PackageNotFoundError:
        return Check(subject=name, state="trouble", detail="not installed", fix=f"pip install {name}")


def _disk(root: Path) -> Check:
    folder = next(p for p in (root.absolute(), *root.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    enough = free >= MIN_FREE_BYTES and os.access(folder, os.W_OK)
    detail = f"{free / 2**30:.1f} GiB free for {root}/" + ("" if os.access(folder, os.W_OK) else ", not writable")
    return Check(
        subject="disk", state="yes" if enough else "trouble", detail=detail, fix="" if enough else "use --root"
    )


def _extras() -> list[Check]:
    checks = []
    for extra, (modules, purpose) in EXTRAS.items():
        missing = [m for m in modules if not _found(m)]
        detail = purpose if not missing else f"{purpose}: {', '.join(missing)} not installed"
        fix = f"pip install -e '.[{extra}]'" if missing else ""
        checks.append(Check(subject=f"extra {extra}", state="no" if missing else "yes", detail=detail, fix=fix))
    has_slurm = shutil.which("sbatch") is not None
    detail = "sbatch found" if has_slurm else "no sbatch on the path: notebooks run on this machine only"
    return [*checks, Check(subject="Slurm", state="yes" if has_slurm else "no", detail=detail)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _devices() -> list[Check]:
    """The CPU and the GPUs, as a child process that loads torch finds them."""
    from workbench.hardware.facts import detect

    checks = []
    for name, subject in (("cpu", "CPU"), ("cuda", "GPU")):
        try:
            facts = detect(name)
        except Refused as refused:
            detail = f"none that torch can use ({refused.allowed}): speed-ups and memory ceilings of GPUs need one"
            checks.append(Check(subject=subject, state="no", detail=detail))
        except (RuntimeError, OSError) as error:
            checks.append(Check(subject=subject, state="trouble", detail=str(error).splitlines()[-1]))
        else:
            checks.append(Check(subject=subject, state="yes", detail=_describe(facts)))
    return checks


def _describe(facts: Any) -> str:
    peaks = ", ".join(f"{precision} {flops / 1e12:.3g}" for precision, flops in facts.peak_flops.items())
    count = f"{facts.count} × " if facts.count > 1 else ""
    cores = cpu_count()
    spared = facts.kind == "cpu" and facts.threads < cores
    threads = f"; {facts.threads} of {cores} cores compute, so that timing is steady (OMP_NUM_THREADS sets it)"
    return f"{count}{facts.name}, {facts.memory_bytes / 2**30:.0f} GiB, TFLOP/s: {peaks} ({facts.peak_source})" + (
        threads if spared else ""
    )
