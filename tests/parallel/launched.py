"""What the ranks of the launcher's tests run; as a program, a launch that waits to be ended from outside."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.parallel.launch import launch


def add_ranks(start: float = 0.0) -> tuple[int, float]:
    print(f"here is rank {dist.get_rank()}")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail(rank: int, how: str) -> None:
    """One rank goes wrong while the other waits for it in a collective."""
    print(f"last words of {dist.get_rank()}")
    if dist.get_rank() == rank:
        go_wrong(how)
    dist.all_reduce(torch.ones(1))


def go_wrong(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("the loss is a fish")
        case "exit 3":
            os._exit(3)
        case "exit 0":
            os._exit(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)


def return_what_cannot_be_sent() -> object:
    return lambda: None


def wait(folder: Path) -> None:
    """In a collective that never comes about, where Python cannot act on a signal."""
    mine = folder / f"unread-{dist.get_rank()}"
    mine.write_text(str(os.getpid()))
    mine.rename(folder / f"pid-{dist.get_rank()}")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(600)


if __name__ == "__main__":
    launch(wait, 2, Path(sys.argv[1]), device_type="cpu")
