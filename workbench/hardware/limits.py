"""How much memory this process may use: a container or a batch job often has less than the machine."""

from pathlib import Path

import psutil

V2, V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


def memory_limit() -> int:
    """Bytes: the machine's memory, or the lowest limit of the control groups that this process is in."""
    limits = [psutil.virtual_memory().total, *_limits(_groups(), V2, V1)]
    return min(limits)


def _groups() -> list[str]:
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def _limits(groups: list[str], v2: Path, v1: Path) -> list[int]:
    """Limits along the path from each group up to its hierarchy's root. Lines read ``0::/path`` (v2), ``4:memory:/path`` (v1).

    Inside a container the path may be the host's, which is not there; the root is the container's own then.
    """
    limits = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (v1, "memory.limit_in_bytes") if controllers else (v2, "memory.max")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            limits += _read(folder / name)
    return limits


def _read(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []
