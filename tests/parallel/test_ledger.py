"""Bytes counted by hand, to the byte."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.parallel.ledger import Ledger

B, D, F = 4, 128, 256
"""Rows, width and hidden width: every tensor below is a multiple of 512 bytes, so that rounding adds nothing."""


def test_tensors_count_while_they_live() -> None:
    with Ledger("cpu") as ledger:
        first = torch.zeros(1000)
        second = first * 2
        view = second[10:20]
        assert ledger.live == 8000
        del first, second
        assert ledger.live == 4000
        view.zero_()
        del view
        assert ledger.live == 0
    assert ledger.peak().breakdown["activations"] == 8000


def test_a_storage_that_is_resized_counts_at_its_size() -> None:
    with Ledger("cpu") as ledger:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        assert ledger.live == 0
        tensor.untyped_storage().resize_(8000)
        assert ledger.live == 8000
    assert ledger.peak().breakdown["activations"] == 8000


def test_other_devices_do_not_count() -> None:
    with FakeTensorMode(), Ledger("cuda") as ledger:
        torch.zeros(1000)
        on_device = torch.zeros(1000, device="cuda")
        assert ledger.live == on_device.nbytes


def run_step(ledger: Ledger) -> tuple[dict[str, int], str]:
    """A training step of two linear layers, with SGD and momentum, twice: the second has the momentum from the start."""
    model = nn.Sequential(nn.Linear(D, F, bias=False), nn.ReLU(), nn.Linear(F, D, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    ledger.assign(model.parameters(), "parameters")
    for _ in range(2):
        x = torch.zeros(B, D)
        with ledger.during(phase="forward"):
            loss = model(x).square().sum()
        with ledger.during(phase="backward"):
            loss.backward()
        ledger.assign((p.grad for p in model.parameters()), "gradients")
        del loss
        with ledger.during(phase="update", kind="optimizer"):
            optimizer.step()
        optimizer.zero_grad()
    peak = ledger.peak(since="forward")
    return peak.breakdown, peak.phase


def test_a_training_step_peaks_where_and_as_high_as_a_count_by_hand_says() -> None:
    weights = 2 * D * F * 4
    with Ledger("cpu") as ledger:
        breakdown, phase = run_step(ledger)
    assert breakdown["parameters"] == breakdown["gradients"] == breakdown["optimizer"] == weights
    # Where the first layer's gradient appears there are also the input, the hidden row's gradient, the loss and its own.
    assert breakdown["activations"] == B * D * 4 + B * F * 4 + 4 + 4
    assert breakdown["rounding"] == 2 * (512 - 4)
    assert (breakdown["gathered"], breakdown["workspace"], phase) == (0, 0, "backward")


def test_fake_tensors_give_the_same_count_as_real_ones() -> None:
    with Ledger("cpu") as real:
        expected = run_step(real)
    with FakeTensorMode(), Ledger("cpu") as fake:
        assert run_step(fake) == expected
