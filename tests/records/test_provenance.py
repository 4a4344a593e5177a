"""What a run says of the code and the machine it ran on."""

import subprocess
from pathlib import Path

import pytest

from workbench.records import provenance


def test_code_packages_and_machine_are_named() -> None:
    found = provenance.collect()
    assert found["python"].count(".") == 2
    assert found["host"] and found["platform"]
    assert found["packages"]["papermill"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    if head.returncode == 0:
        assert found["git_commit"] == head.stdout.strip()
        assert isinstance(found["git_dirty"], bool)


def test_what_cannot_be_had_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    provenance._gpus.cache_clear()
    found = provenance.collect()
    assert "git_commit" not in found and "gpus" not in found
    provenance._gpus.cache_clear()


def test_power_caps_are_taken_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 570.1, 300.00 W'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    provenance._gpus.cache_clear()
    assert provenance.collect()["gpus"] == ["Some GPU, 570.1, 300.00 W"]
    provenance._gpus.cache_clear()
