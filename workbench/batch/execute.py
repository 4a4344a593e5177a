"""``python -m workbench.batch.execute RUN_DIR SOCKET_DIR RUNNER_PID [CELL_TIMEOUT]``: the process that executes a notebook.

The last line on standard output is the outcome as JSON. The process ends, and takes the kernel with it, when the runner
that started it is gone.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from workbench.batch.executed import settle
from workbench.batch.notebook import EXECUTED
from workbench.batch.processes import adopt_orphans, end_all
from workbench.records.record import EXIT_CODES

WATCH_INTERVAL_S = 0.5


def main(arguments: list[str]) -> int:
    folder, sockets = Path(arguments[0]), Path(arguments[1])
    runner, cell_timeout = int(arguments[2]), int(arguments[3]) if len(arguments) > 3 else None
    # The runner says who it is: it may be gone before this line, and then the parent is another process already.
    threading.Thread(target=_watch_runner, args=(runner, folder), daemon=True).start()
    adopt_orphans()
    # A checker of international web addresses: nothing here asks it anything, and it takes two seconds to load.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    try:
        from workbench.batch.client import execute

        status, error = execute(folder, sockets, cell_timeout)
    except Exception as problem:
        with contextlib.suppress(OSError):  # the log may lie on the disk that is full
            traceback.print_exc()
        status, error = "failed", f"the notebook could not be executed: {type(problem).__name__}: {problem}"
    end_all(folder, descendants=True)
    print(json.dumps({"status": status, "error": error}), flush=True)
    return EXIT_CODES[status]


def _watch_runner(runner: int, folder: Path) -> None:
    while os.getppid() == runner:
        time.sleep(WATCH_INTERVAL_S)
    end_all(folder, descendants=True)
    settle(folder / EXECUTED, "killed", "the process that ran it was gone")
    os._exit(EXIT_CODES["killed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
