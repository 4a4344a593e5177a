"""What all tests share."""

import os

import pytest

# Two test processes share two cores: with more threads every operator waits at a barrier. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _outside_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may be started by a run; what they start must not take that run for its own."""
    monkeypatch.delenv("WORKBENCH_RUN_DIR", raising=False)
