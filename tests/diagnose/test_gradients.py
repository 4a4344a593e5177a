import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.diagnose.ranks import run_ranks
from workbench.diagnose import gradients as subject
from workbench.diagnose.gradients import GradientMonitor, total_norm
from workbench.errors import Refused


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def backward(model: nn.Module) -> None:
    model(torch.randn(8, 5, generator=torch.Generator().manual_seed(1))).square().sum().backward()


def norm(*tensors: Tensor | None) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors if t is not None]).norm())


def test_statistics_are_of_the_layer_before_clipping_and_of_its_own_update() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = GradientMonitor(model, every=2)
    expected = []
    for step in range(4):
        backward(model)
        layers = (model[0], model[2])
        grads = [norm(m.weight.grad, m.bias.grad) for m in layers]
        peaks = [max(float(p.grad.abs().max()) for p in m.parameters()) for m in layers]
        before = [norm(m.weight, m.bias) for m in layers]
        monitor.before_clipping(step)
        factor = 0.5 / float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        monitor.after_update(step)
        optimizer.zero_grad()
        if step % 2 == 0:
            expected.append((grads, peaks, before, [0.1 * factor * g / w for g, w in zip(grads, before, strict=True)]))
    history = monitor.history()
    assert history.layers == ("0", "2") and history.steps.tolist() == [0, 2]
    np.testing.assert_allclose(history.norm, [e[0] for e in expected], rtol=1e-5)
    np.testing.assert_allclose(history.largest, [e[1] for e in expected], rtol=1e-5)
    np.testing.assert_allclose(history.weight, [e[2] for e in expected], rtol=1e-5)
    np.testing.assert_allclose(history.update_ratio, [e[3] for e in expected], rtol=1e-4)
    assert not history.nonfinite.any() and len(history.records()) == 4


def test_nonfinite_elements_are_counted_in_the_layer_that_holds_them() -> None:
    model = net()
    backward(model)
    assert model[2].weight.grad is not None
    model[2].weight.grad[0, :2] = torch.tensor([torch.inf, torch.nan])
    monitor = GradientMonitor(model, every=1, updates=False)
    monitor.before_clipping(0)
    history = monitor.history()
    assert history.nonfinite.tolist() == [[0, 2]]
    assert np.isfinite(history.norm[0, 0]) and np.isnan(history.largest[0, 1]) and np.isnan(history.update_ratio).all()


def test_the_devices_way_of_counting_agrees_with_the_hosts() -> None:
    tensors = [torch.randn(100), torch.tensor([torch.nan, 1.0, -torch.inf]), torch.zeros(4)]
    counts = torch._foreach_norm(torch._foreach_mul(tensors, 0.0), 0)
    norms = torch.stack(torch._foreach_norm(tensors, 2))
    assert subject._nonfinite(tensors, norms).tolist() == [float(c) for c in counts] == [0, 2, 0]


def test_frozen_and_unused_parameters_do_not_disturb() -> None:
    model = net()
    model[0].requires_grad_(False)
    model.add_module("unused", nn.Linear(2, 2))
    monitor = GradientMonitor(model, every=1)
    model[2](torch.randn(4, 7)).sum().backward()
    monitor.before_clipping(0)
    monitor.after_update(0)
    history = monitor.history()
    assert history.layers == ("2", "unused") and history.norm[0, 1] == 0
    with pytest.raises(Refused):
        GradientMonitor(net().requires_grad_(False))


def test_the_host_reads_the_device_once_however_many_layers_and_steps() -> None:
    """On a device whose values the host cannot see, a monitored step runs through: nothing in it waits."""

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with torch.device("meta"):
        model = net()
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    monitor = GradientMonitor(model, every=1)
    with Reads() as reads:
        for step in range(3):
            monitor.before_clipping(step)
            monitor.after_update(step)
    assert reads.count == 0


def _sharded(rank: int) -> dict[str, object]:
    plain, model = net(), net()
    backward(plain)
    fully_shard(model[0])
    fully_shard(model)
    backward(model)
    monitor, reference = (GradientMonitor(m, every=1) for m in (model, plain))
    for watched, m in ((monitor, model), (reference, plain)):
        watched.before_clipping(0)
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.01)
        watched.after_update(0)
    grads = [p.grad for p in model.parameters()]
    # Tensors of two meshes at once, one of them replicated on an axis, as tensor parallelism makes them.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    g = torch.arange(12.0).view(4, 3)
    mixed = [
        *grads,
        distribute_tensor(g, mesh, [Replicate(), Shard(0)]),
        distribute_tensor(g, mesh, [Shard(1), Shard(0)]),
        g,
    ]
    whole = norm(*(p.grad for p in plain.parameters()))
    return {
        "history": monitor.history(),
        "reference": reference.history(),
        "total": (float(total_norm(mixed)), (whole**2 + 3 * norm(g) ** 2) ** 0.5),
        "local": norm(*(p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor))) / whole,
    }


def test_sharded_gradients_give_the_whole_layers_statistics_on_every_rank() -> None:
    for result in run_ranks(_sharded):
        history, reference = result["history"], result["reference"]
        for name in ("norm", "largest", "nonfinite", "update_ratio", "weight"):
            np.testing.assert_allclose(getattr(history, name), getattr(reference, name), rtol=1e-5, err_msg=name)
        assert result["total"][0] == pytest.approx(result["total"][1], rel=1e-5)
        assert result["local"] < 0.95  # what a rank's own shards would have said
