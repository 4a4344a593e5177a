"""The loader: order, last batches, workers' random draws, and going on at the exact sample."""

import gc
import random
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.data_loading.planted import GlobalDraws, Jitter, StoredGenerator
from workbench.data.datasets import open_dataset
from workbench.data.loading import Loader, epoch_order, make_loader, validation_batches
from workbench.data.randomness import check_draws, drawing_from, stored_generators
from workbench.errors import Refused


def _take(loader: Loader, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [next(loader) for _ in range(count)]


def _same(one: list[tuple[torch.Tensor, torch.Tensor]], other: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def test_an_epoch_has_every_sample_once_and_another_order_than_the_next() -> None:
    dataset = GlobalDraws()
    loader = make_loader(dataset, 6, seed=3, drop_last=False)
    epochs = [[int(label) for _, labels in loader for label in labels] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != [int(k) for k in epoch_order(20, seed=4, epoch=0)], "another seed, the same order"
    assert epochs[0] == [int(k) for k in epoch_order(20, seed=3, epoch=0)]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [6, 6, 6]), (False, [6, 6, 6, 2])])
def test_the_last_batch_is_left_out_or_smaller(drop_last: bool, sizes: list[int]) -> None:
    loader = make_loader(GlobalDraws(), 6, shuffle=False, drop_last=drop_last)
    assert len(loader) == len(sizes)
    assert [len(labels) for _, labels in loader] == sizes
    assert [len(labels) for _, labels in _take(loader, len(sizes) + 1)] == [*sizes, 6], "next() goes over the end"


def test_validation_reads_every_sample_once_in_order() -> None:
    dataset = open_dataset("digits", "val")
    labels = torch.cat([labels for _, labels in validation_batches(dataset, 100)])
    assert labels.tolist() == [dataset[k][1] for k in range(len(labels))]
    assert len(labels) == len(dataset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch_size": 21}, "batch size.*1 to 20"),
        ({"batch_size": 0}, "batch size"),
        ({"num_workers": -1}, "num_workers"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(Refused, match=named):
        make_loader(GlobalDraws(), **({"batch_size": 4} | arguments))  # type: ignore[arg-type]


def test_a_data_set_of_a_notebook_cell_is_refused_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = type("FromCell", (GlobalDraws,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # a notebook's has no file
    with pytest.raises(Refused, match=r"FromCell.*notebook cell"):
        make_loader(cell(), 4, num_workers=1)
    assert len(make_loader(cell(), 4)) == 5


@pytest.mark.parametrize("source", ["digits", "synthetic:3x8x8:10:100"])
@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_a_resumed_loader_goes_on_at_the_exact_sample(source: str, stop: int) -> None:
    dataset = open_dataset(source, "train")
    size = len(dataset) // 3 + 1  # type: ignore[arg-type]
    straight = _take(make_loader(dataset, size, seed=7), 8)
    before = make_loader(dataset, size, seed=7)
    _take(before, stop)
    after = make_loader(dataset, size, seed=7)
    after.load_state_dict(before.state_dict())
    assert _same(_take(after, 8 - stop), straight[stop:])


def test_a_loop_resumed_in_an_epoch_reads_what_is_left_of_it() -> None:
    loader = make_loader(GlobalDraws(), 4, seed=1)
    _take(loader, 3)
    resumed = make_loader(GlobalDraws(), 4, seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 2
    assert len(list(resumed)) == 5


@pytest.mark.parametrize("other", [{"seed": 2}, {"batch_size": 5}, {"shuffle": False}, {"drop_last": False}])
def test_a_position_of_another_run_is_refused(other: dict[str, int]) -> None:
    state = make_loader(GlobalDraws(), 4, seed=1).state_dict()
    loader = make_loader(GlobalDraws(), **({"batch_size": 4, "seed": 1} | other))  # type: ignore[arg-type]
    with pytest.raises(Refused, match=next(iter(other))):
        loader.load_state_dict(state)


def test_reading_leaves_the_global_generators_as_they_were() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.random(), float(torch.rand(()))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    _take(make_loader(GlobalDraws(), 4), 3)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected


def test_a_dropped_loader_needs_no_garbage_collector_to_stop_its_workers() -> None:
    """In a cycle of references the workers' queues may go first, and the program hangs for seconds."""
    loader = make_loader(GlobalDraws(), 4)
    next(loader)
    still_there = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert still_there() is None
    finally:
        gc.enable()


def test_generators_of_one_data_set_draw_different_numbers() -> None:
    """Seeded alike, two transforms would shift every image equally far in both directions."""
    kept = [*(Jitter() for _ in range(2)), np.random.default_rng(0), np.random.default_rng(0), random.Random(0)]
    found = stored_generators(types.SimpleNamespace(transforms=kept, module=np))
    assert len(found) == 7, "two in each transform, three beside, and none of a module's own"
    with drawing_from(11, found):
        draws = [
            float(torch.rand((), generator=g)) if isinstance(g, torch.Generator) else float(g.random()) for g in found
        ]
        draws += [float(np.random.random()), random.random(), float(torch.rand(()))]
    assert len(set(draws)) == len(draws)


def test_workers_change_neither_order_nor_random_draws_and_resume_exactly() -> None:
    """Transforms keep generators here, so this fails unless each sample's draws are its own."""
    here = _take(make_loader(GlobalDraws(), 6, seed=2), 8)
    loader = make_loader(GlobalDraws(), 6, seed=2, num_workers=2)
    there = _take(loader, 4)
    state = loader.state_dict()
    resumed = make_loader(GlobalDraws(), 6, seed=2, num_workers=1)
    resumed.load_state_dict(state)
    assert _same(there + _take(resumed, 4), here)


def test_a_stored_generator_repeats_its_draws_under_plain_workers_and_not_under_ours() -> None:
    def plain(dataset: Dataset[object]) -> DataLoader[object]:
        return DataLoader(dataset, batch_size=2, num_workers=2)

    planted = check_draws(StoredGenerator(), plain)
    assert planted.faulty
    assert planted.repeated_in_epoch == planted.num_samples, "both workers draw the same: half of each of two epochs"
    assert planted.repeated_across_epochs > 0

    for num_workers in (0, 2):
        ours = check_draws(
            StoredGenerator(), lambda d, n=num_workers: make_loader(d, 2, num_workers=n, drop_last=False)
        )
        assert ours.random and not ours.faulty, ours


def test_a_data_set_without_draws_is_not_called_faulty(photographs: Path) -> None:
    report = check_draws(open_dataset(str(photographs), "train"), lambda d: make_loader(d, 4), num_samples=8)
    assert not report.random and not report.faulty
