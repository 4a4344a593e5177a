"""Ranks start from anywhere, and end together: whatever happens to one of them, none is left and the right one is named."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.parallel import launched
from workbench.errors import Refused
from workbench.parallel.launch import RankFailed, launch

TIMEOUT_S = 8.0
"""Ranks that load torch on busy cores come late to their first meeting, but not by this much."""


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = _children()
    yield
    assert _soon(lambda: _children() <= before)


def _children() -> set[psutil.Process]:
    """Without the tracker of shared resources, which Python starts once and keeps."""
    children = [process for process in psutil.Process().children(recursive=True) if _runs(process)]
    return {process for process in children if "resource_tracker" not in " ".join(process.cmdline())}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _soon(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_two_launches_at_once_both_return_what_their_ranks_did(capfd, tmp_path):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(launch, launched.add_ranks, 2, start, log_dir=tmp_path, device_type="cpu")
            for start in (0.0, 5.0)
        ]
        assert [run.result() for run in runs] == [[(0, 1.0), (1, 1.0)], [(0, 11.0), (1, 11.0)]]
    shown = capfd.readouterr().out
    assert shown.count("[0] here is rank 0") == shown.count("[1] here is rank 1") == 2
    assert sum("here is rank 1" in log.read_text() for log in tmp_path.rglob("stdout.log")) == 2
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "said"),
    [
        (1, "raise", "ValueError: the loss is a fish"),
        (0, "exit 3", "exit code 3"),
        (1, "exit 0", "exit code 0 and without a result"),
        (1, "SIGKILL", "killed by SIGKILL"),
        (1, "hang", "hung"),
    ],
)
def test_a_rank_that_goes_wrong_ends_all_and_is_named(rank, how, said):
    handler = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {rank} ") as failure:
        launch(launched.fail, 2, rank, how, timeout=TIMEOUT_S if how == "hang" else 60.0, device_type="cpu")
    assert time.monotonic() - began < 60
    assert failure.value.rank == rank and said in str(failure.value)
    assert f"last words of {rank}" in failure.value.log_tail
    if how in ("raise", "hang"):
        assert "go_wrong" in failure.value.traceback
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank():
    with pytest.raises(RankFailed, match="pickle"):
        launch(launched.return_what_cannot_be_sent, 1, device_type="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_no_rank_outlives_the_process_that_launched_it(tmp_path, how):
    """The program's function stands in its main module, which is a file: ranks find it there."""
    command = [sys.executable, "-m", "tests.parallel.launched", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        both_wait = _soon(lambda: process.poll() is not None or len(list(tmp_path.glob("pid-*"))) == 2, within_s=60)
        assert both_wait and process.poll() is None
        ranks = [psutil.Process(int(file.read_text())) for file in tmp_path.glob("pid-*")]
        process.send_signal(how)
        error = process.communicate(timeout=30)[1]
    assert process.returncode != 0
    assert how == signal.SIGKILL or "KeyboardInterrupt" in error
    assert _soon(lambda: not any(map(_runs, ranks)))


def _cell_function():
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile("def train(): pass", "/tmp/ipykernel_1/2.py", "exec"), namespace)
    return namespace["train"]


def _closure():
    threading_lock = threading.Lock()
    return lambda: threading_lock


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (_cell_function(), (), "notebook"),
        (lambda: None, (), "by its name"),
        (_closure(), (), "by its name"),
        (launched.add_ranks, (threading.Lock(),), "pickle"),
        (launched.add_ranks, (lambda: None,), "pickle"),
    ],
    ids=["cell", "lambda", "closure", "lock", "lambda as argument"],
)
def test_what_a_fresh_process_would_not_find_is_refused_before_any_starts(fn, args, reason):
    before = _children()
    with pytest.raises(Refused, match=reason) as refusal:
        launch(fn, 2, *args, device_type="cpu")
    assert refusal.value.allowed and "module" in refusal.value.fix
    assert _children() == before


def test_no_ranks_and_more_gpus_than_there_are_are_refused():
    with pytest.raises(Refused, match="1 rank"):
        launch(launched.add_ranks, 0)
    with pytest.raises(Refused, match="GPUs of this machine"):
        launch(launched.add_ranks, 10_000, device_type="cuda")


@pytest.fixture
def _in_a_world_of_one(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_under_torchrun_the_function_runs_in_place(_in_a_world_of_one):
    assert launch(os.getpid, 1, device_type="cpu") == [os.getpid()]


def test_a_world_other_than_torchruns_is_refused(_in_a_world_of_one):
    with pytest.raises(Refused, match="world"):
        launch(os.getpid, 2, device_type="cpu")
