"""Our own kernel: this interpreter's ipykernel, over sockets in a private folder, whatever kernels are installed.

A notebook that names the kernel of another machine runs all the same, and no port is taken, so any number run at once.
"""

import sys
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

METADATA = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
# Without a history file: many kernels at once would wait for its lock.
COMMAND = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False"]


class OwnKernelManager(AsyncKernelManager):
    """Starts ``sys.executable -m ipykernel_launcher`` with its sockets in ``folder``."""

    _exit_code: int | None = None

    def __init__(self, folder: Path, **traits: Any) -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, 0)  # a flood of output is capped by us, not dropped by ZeroMQ on the way
        super().__init__(
            transport="ipc",
            ip=str(folder / "k"),
            connection_file=str(folder / "kernel.json"),
            context=context,
            **traits,
        )

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=COMMAND, display_name=METADATA["display_name"], language="python")

    def exit_code(self) -> int | None:
        """Of the kernel's process, also once it was cleaned up: negative for a signal, ``None`` while it lives."""
        process = getattr(self.provisioner, "process", None)
        return self._exit_code if process is None else process.poll()

    async def cleanup_resources(self, restart: bool = False) -> None:  # type: ignore[override]
        self._exit_code = self.exit_code()
        await super().cleanup_resources(restart)
