"""A rank that is killed takes nothing with it but the steps since the last checkpoint. The benchmark kills twenty."""

from pathlib import Path

import pytest

from tests.parallel.kills import ordeal


@pytest.mark.slow
def test_a_training_whose_ranks_are_killed_ends_like_one_left_alone(
    tmp_path: Path,
) -> None:
    result = ordeal(tmp_path, kills=2, world=2, seed=0, phases=("collective", "checkpoint"))
    assert all(seen["good"] for seen in result["rounds"]), result["rounds"]
    assert result["same_weights"]
