from pathlib import Path

import psutil
import pytest

from workbench.hardware.limits import _limits, memory_limit


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("line", "files", "limits"),
    [
        ("0::/", {"v2/memory.max": "max"}, []),
        ("0::/job_1/step_0", {"v2/job_1/step_0/memory.max": "max", "v2/job_1/memory.max": "4096"}, [4096]),
        ("0::/of/the/host", {"v2/memory.max": "8192"}, [8192]),
        ("4:memory:/job", {"v1/job/memory.limit_in_bytes": "512", "v1/memory.limit_in_bytes": "1024"}, [512, 1024]),
        ("7:cpu,memory:/job", {"v1/job/memory.limit_in_bytes": "512"}, [512]),
        ("3:cpuset:/job", {"v1/job/memory.limit_in_bytes": "512", "v2/job/memory.max": "512"}, []),
        ("1:name=systemd:/", {"v1/memory.limit_in_bytes": "512"}, []),
        ("0::/", {}, []),
    ],
)
def test_a_limit_counts_wherever_above_the_process_it_is_set(
    line: str, files: dict[str, str], limits: list[int], tmp_path: Path
) -> None:
    for name, text in files.items():
        _write(tmp_path / name, text + "\n")
    assert _limits([line], tmp_path / "v2", tmp_path / "v1") == limits


def test_the_limit_is_never_above_the_machine() -> None:
    assert 0 < memory_limit() <= psutil.virtual_memory().total
