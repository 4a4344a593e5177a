"""The process of one arm: builds its task, then measures blocks and trains guard runs as the parent asks.

Started by ``arms.py`` as ``python -m workbench.experiment.arm_process READ_FD WRITE_FD LIFE_FD``. Messages are JSON both ways.
The process and all that it started end when the parent's ends of the pipes close, so nothing outlives the parent.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from workbench.errors import Refused, nearest
from workbench.experiment.finding import ArmStatus

Message = dict[str, Any]


def main(read_fd: int, write_fd: int, life_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Interrupt is the parent's to handle; it closes the pipe
    _die_with_parent(life_fd)
    requests: SimpleQueue[Message] = SimpleQueue()
    answers = Connection(write_fd, readable=False)
    threading.Thread(target=_listen, args=(Connection(read_fd, writable=False), requests), daemon=True).start()

    def answer(kind: str, **fields: Any) -> None:
        answers.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def on_step(step: int, **values: float) -> None:
        answer("step", step=step, values=values)

    task: Any = None
    while True:
        request = requests.get()
        try:
            if request["ask"] == "build":
                task = _build(request)
                task.warm_up(request["warmup_steps"])
                answer("ready")
            elif request["ask"] == "block":
                answer("block", **task.block(request["steps"])._asdict())
            elif request["ask"] == "guard":
                run = task.guard_run(request["seed"], request["steps"], on_step)
                answer("guard", **run._asdict())
        except Refused as refusal:
            answer("refused", error=str(refusal))
        except BaseException as error:
            traceback.print_exc()
            status = classify(error)
            # A divergence says what happened by itself; a crash needs to show where.
            answer("failed", status=status, error=str(error) if status == "diverged" else _last_lines(error))


def _die_with_parent(life_fd: int) -> None:
    """Kill this process group once the parent is gone, whoever in it hangs, is stopped or holds the interpreter's lock.

    A thread could not: it needs the lock, and workers of this process would survive it.
    """
    subprocess.Popen(["/bin/sh", "-c", "read line; kill -9 0"], stdin=life_fd)
    os.close(life_fd)


def _listen(connection: Connection, requests: "SimpleQueue[Message]") -> None:
    while True:
        try:
            requests.put(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone or done: whatever runs here is wanted by no one


def _build(request: Message) -> Any:
    from workbench.hardware.facts import DeviceFacts
    from workbench.trainer.config import TrainConfig

    config, facts = TrainConfig(**request["config"]), DeviceFacts(**request["facts"])
    return _task_class(request["task"])(config, facts, **request["task_args"])


def _task_class(task: str) -> Any:
    """The class that ``package.module:Class`` names; refused where there is none, but not where its module is broken."""
    name, _, attribute = task.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise Refused("task", task, allowed="package.module:Class", fix=f"install or correct {error.name!r}") from None
    if not hasattr(module, attribute):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise Refused("task", task, allowed=f"a class of {name}", fix=nearest(attribute, classes))
    return getattr(module, attribute)


def classify(error: BaseException) -> ArmStatus:
    """What an exception means for the arm."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or "can't allocate memory" in str(error):
        return "oom"
    if "GateFailed" in names:
        return "inexact"
    return "diverged" if "Diverged" in names else "crashed"


def _last_lines(error: BaseException, lines: int = 12) -> str:
    text = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(text[-lines:])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
