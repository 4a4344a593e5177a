import time
from pathlib import Path

import psutil
import pytest
import torch

from workbench.errors import Refused
from workbench.hardware import facts
from workbench.hardware.facts import DeviceFacts, detect
from workbench.hardware.meters import EnergyMeter, PeakMemory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_cpu_is_measured_once_and_then_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = detect("cpu")
    assert first.peak_flops["fp32"] > 1e8 and first.memory_bandwidth > 1e8 and first.op_overhead_s < 1e-2
    assert first.memory_bytes <= psutil.virtual_memory().total
    assert first.peak_source == "measured matmul" and set(first.matmul_flops) == set(first.peak_flops)
    monkeypatch.setattr(facts.subprocess, "run", None)  # a second measurement would fail
    assert detect("cpu") == first


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    cache = facts._cache_file("cpu")
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    assert isinstance(detect("cpu"), DeviceFacts)
    assert DeviceFacts.model_validate_json(cache.read_bytes())


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:1", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(Refused, match="cpu"):
        detect(name)


def test_workers_leave_one_core_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert int(facts.worker_environment()["OMP_NUM_THREADS"]) == max(facts.cpu_count() - 1, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert facts.worker_environment()["OMP_NUM_THREADS"] == "7"


def test_peak_memory_sees_what_was_freed_before_it_was_read() -> None:
    meter = PeakMemory(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    del block
    assert 50 * 2**20 < meter.read() < 200 * 2**20


def test_peak_memory_forgets_what_was_before_its_reset() -> None:
    meter = PeakMemory(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    del block
    meter.reset()
    assert meter.read() < 32 * 2**20


def test_peak_memory_is_sampled_where_the_kernel_keeps_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    meter = PeakMemory(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    time.sleep(0.2)
    del block
    assert meter.read() > 50 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_energy_is_unknown_and_not_zero_where_there_is_no_meter() -> None:
    assert EnergyMeter(torch.device("cpu")).read() is None
