"""A function on several gloo ranks of this machine, in processes that stay: to start them costs more than most tests."""

import atexit
import functools
import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def run_ranks(function: Callable[[int], Any], world: int = 2) -> list[Any]:
    """``function(rank)`` on ``world`` ranks; their results, in rank order. An exception on any rank is raised here.

    The function must be importable by name.
    """
    port = _free_port()
    jobs = [_process(rank).submit(_on_rank, function, rank, world, port) for rank in range(world)]
    return [job.result(timeout=120) for job in jobs]


@functools.cache
def _process(rank: int) -> ProcessPoolExecutor:
    """A process is always the same rank: DTensor remembers where a rank's part of a tensor begins."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def _on_rank(function: Callable[[int], Any], rank: int, world: int, port: int) -> Any:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        return function(rank)
    finally:
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
