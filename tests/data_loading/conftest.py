from pathlib import Path

import pytest

from workbench.data.samples import write_samples


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test found verified, no other test may know."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty manifest and data folders in place of the repository's."""
    manifests, data = tmp_path / "manifests", tmp_path / "data"
    manifests.mkdir()
    monkeypatch.setenv("WORKBENCH_MANIFESTS", str(manifests))
    monkeypatch.setenv("WORKBENCH_DATA", str(data))
    return manifests, data


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """An image folder: 8 training and 4 validation crops in two classes."""
    return write_samples(tmp_path / "photographs", num_train=8, num_val=4, crop=(96, 64))
