"""A checkpoint of many ranks holds everything to the bit, on as many ranks as there are, or is passed over."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import checkpointed
from tests.parallel.ranks import run_ranks


def without_random(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in summary.items() if k != "random"} for summary in summaries]


def begin(folder: Path, wrapper: str = "fsdp", steps: int = 3, world: int = 4) -> list[dict[str, Any]]:
    return run_ranks(partial(checkpointed.begin, folder, wrapper, steps), world)


def go_on(folder: Path, world: int, wrapper: str = "fsdp") -> list[dict[str, Any]]:
    return run_ranks(partial(checkpointed.go_on, folder, wrapper), world)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Checkpoints of four ranks at step 3, and the state then. The run went on while the files were written."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, begin(folder)


@pytest.fixture
def checkpoints(saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def test_four_ranks_to_two_to_one_and_back_keep_everything_to_the_bit(
    saved: tuple[Path, list[dict[str, Any]]], checkpoints: Path
) -> None:
    state = saved[1]
    for world in (2, 1, 4):
        loaded = go_on(checkpoints, world)
        assert without_random(loaded) == without_random(state)[:world]
        assert [s["random"] for s in loaded] == [s["random"] for s in state][:world]
    assert len({s["random"] for s in state}) == 4


def test_fully_sharded_goes_on_replicated(saved: tuple[Path, list[dict[str, Any]]], checkpoints: Path) -> None:
    loaded = go_on(checkpoints, 2, "ddp")
    assert loaded[0]["weights"] == saved[1][0]["weights"]
    assert loaded[0]["moments"] == saved[1][0]["moments"]


def test_new_ranks_draw_streams_of_their_own(tmp_path: Path) -> None:
    begin(tmp_path, world=2)
    first, second = (go_on(tmp_path, 4) for _ in range(2))
    assert len({s["random"] for s in first}) == 4
    assert [s["random"] for s in second] == [s["random"] for s in first]


def torn(kind: str, path: Path) -> None:
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    if kind == "cut":
        data.write_bytes(content[:-100])
    elif kind == "flipped bit":
        content[len(content) // 2] ^= 0x10
        data.write_bytes(content)
    elif kind == "file lost":
        data.unlink()
    elif kind == "no manifest":
        (path / "manifest.json").unlink()
    elif kind == "manifest cut":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:40])
    else:
        path.rename(path.with_name(f".{path.name}"))  # as it is while it is written


def test_a_torn_checkpoint_is_passed_over_for_the_newest_whole_one(checkpoints: Path) -> None:
    kinds = ["cut", "flipped bit", "file lost", "no manifest", "manifest cut", "unfinished"]
    whole = checkpoints / "step-00000003"
    for step, kind in enumerate(kinds, 10):
        copy = shutil.copytree(whole, checkpoints / f"step-{step:08d}")
        torn(kind, Path(copy))
    (step, loaded), _ = run_ranks(partial(checkpointed.newest, checkpoints), 2)
    assert (step, loaded["counters"]["step"]) == (3, 3)
    assert [p.name for p in checkpoints.glob("*") if not p.name.startswith("torn-")] == ["step-00000003"]


def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(checkpoints: Path) -> None:
    for changes, said in (({"learning_rate": 0.5}, "learning_rate 0.01 then, 0.5 now"), ({"width": 32}, "same model")):
        for message, unchanged in run_ranks(partial(checkpointed.refused, checkpoints, changes)):
            assert said in message
            assert unchanged


def test_weights_that_are_not_finite_on_one_rank_are_refused_on_all(checkpoints: Path) -> None:
    messages = run_ranks(partial(checkpointed.spoil_then_save, checkpoints))
    assert all("non-finite" in message and "3.weight" in message for message in messages)
    assert [p.name for p in checkpoints.iterdir()] == ["step-00000003"]


def test_only_the_newest_are_kept(checkpoints: Path) -> None:
    for _ in range(3):
        go_on(checkpoints, 2)
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000003.002", "step-00000003.003"]
    manifest = json.loads((checkpoints / "step-00000003.003" / "manifest.json").read_bytes())
    assert {".metadata", "state.json"} < set(manifest["files"])
