"""A function on several gloo ranks of this machine."""

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def run_ranks(function: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """``function(rank)`` in ``world_size`` fresh processes joined in a gloo group; their results, in rank order.

    The function must be importable by name. An exception on any rank is raised here.
    """
    port = _free_port()
    with ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_on_rank, function, rank, world_size, port) for rank in range(world_size)]
        return [job.result(timeout=120) for job in jobs]


def _on_rank(function: Callable[[int], Any], rank: int, world_size: int, port: int) -> Any:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        return function(rank)
    finally:
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
