from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from workbench.diagnose.nonfinite import FirstNonFinite, NonFinite, NonFiniteFound
from workbench.errors import Refused


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def chain(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), Apply(function), nn.Linear(4, 4), nn.LayerNorm(4))


def first(model: nn.Module, x: Tensor | None = None, step: int = 7) -> NonFinite | None:
    finder = FirstNonFinite(model, policy="skip", rank=2)
    with finder.watch(step):
        output = model(torch.randn(3, 4) if x is None else x)
        output.float().square().sum().backward()
    assert finder.action == ("skip" if finder.found else "go on")
    return finder.found


@pytest.mark.parametrize(
    ("function", "operator", "kind"),
    [
        (lambda x: (x * 0).log(), "log", "-inf"),
        (lambda x: x * 1e30 * 1e30, "mul", "±inf"),
        (lambda x: x.abs().neg().sub(1).sqrt(), "sqrt", "NaN"),
        (lambda x: (x.abs() + 100).exp(), "exp", "+inf"),
        (lambda x: (x.half() * 3e4 * 3e4).float(), "mul", "±inf"),
    ],
)
def test_forward_producers_are_named(function: Callable[[Tensor], Tensor], operator: str, kind: str) -> None:
    assert first(chain(function)) == NonFinite(7, 2, "forward", "2", operator, kind, "producer")


def test_a_backward_producer_is_named_by_the_module_whose_forward_made_it() -> None:
    found = first(chain(lambda x: (x * 0).abs().sqrt()))
    assert found is not None
    assert (found.direction, found.module, found.operator, found.role) == ("backward", "2", "div", "producer")


def test_infinity_that_softmax_turns_into_nan_is_produced_by_softmax() -> None:
    found = first(chain(lambda x: torch.softmax(torch.full_like(x, -torch.inf) + x, dim=-1)))
    assert found is not None
    assert (found.operator, found.kind, found.role) == ("_softmax", "NaN", "producer")


def test_a_weight_that_was_not_finite_is_the_source() -> None:
    model = chain(torch.tanh)
    with torch.no_grad():
        model[3].weight[0, 0] = torch.inf
    found = first(model)
    assert found is not None
    assert (found.module, found.operator, found.role, found.source) == ("3", "addmm", "propagator", "3.weight")


def test_a_bad_batch_is_the_source() -> None:
    found = first(chain(torch.tanh), torch.full((3, 4), torch.nan))
    assert found is not None
    assert (found.module, found.role, found.source) == ("0", "propagator", "the model's input")


def masked_attention(x: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    bias = torch.zeros(3, 3).fill_(-torch.inf).triu(1)
    return torch.softmax(scores, -1) @ x + torch.softmax(bias, -1) @ x


MASK = torch.full((3, 3), -torch.inf).triu(1)

HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.tanh,
    "masked attention": masked_attention,
    "causal sdpa": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], is_causal=True
    )[0, 0],
    "unwritten memory": lambda x: torch.empty(1000).fill_(2.0)[:4] * x,
    "mask in a buffer": lambda x: torch.softmax(x @ x.mT + MASK, -1) @ x,
    "absorbed": lambda x: torch.where(x.detach() > 0, x, x.detach().mul(0).log().exp()),
    "max over a masked set": lambda x: x * torch.where(x > 9, x, -torch.inf).amax().clamp(min=0.5),
    "recomputed": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_are_quiet(name: str) -> None:
    model = chain(HEALTHY[name])
    model[2].register_buffer("mask", MASK)
    assert first(model) is None


@pytest.mark.parametrize(("gain", "module", "operator"), [(1.0, "(outside the model)", "_to_copy"), (300.0, "3", "mm")])
def test_overflow_of_a_scaled_loss_is_seen_in_the_half_precision_backward(
    gain: float, module: str, operator: str
) -> None:
    """A scale too large overflows where the loss's gradient becomes fp16; large weights, in the product with them."""
    model = chain(torch.tanh)
    with torch.no_grad():
        model[3].weight *= gain
    finder = FirstNonFinite(model, policy="stop")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22 / gain)
    with finder.watch(0):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model[:4](torch.randn(64, 4)).float().abs().mean() * 64
        scaler.scale(loss).backward()
    assert finder.found and finder.found.direction == "backward" and finder.action == "stop"
    assert (finder.found.module, finder.found.operator) == (module, operator)


def test_integer_and_other_outputs_pass() -> None:
    class Head(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"logits": [x, None], "label": x.argmax(-1), "name": "x", "flag": True}

    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": Head()})
    finder = FirstNonFinite(model)
    with finder.watch(0):
        out = model["head"](model["body"](torch.randn(3, 4)))
        F.cross_entropy(out["logits"][0], out["label"]).backward()
    assert finder.found is None


def test_raise_names_what_it_found() -> None:
    model = chain(lambda x: (x * 0).log())
    said = r"first -inf at step 5 on rank 0: log in 2 \(forward, producer\)"
    with pytest.raises(NonFiniteFound, match=said), FirstNonFinite(model).watch(5):
        model(torch.randn(3, 4)).sum().backward()


def test_no_hook_is_left_behind_whatever_leaves_the_context() -> None:
    def boom(x: Tensor) -> Tensor:
        raise KeyError("boom")

    for function, error in ((boom, KeyError), (lambda x: (x * 0).log(), NonFiniteFound)):
        model = chain(function)
        with pytest.raises(error), FirstNonFinite(model).watch(0):
            model(torch.randn(3, 4)).sum().backward()
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(Refused, match="raise, skip or stop"):
        FirstNonFinite(nn.Linear(2, 2), policy="warn")  # type: ignore[arg-type]


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(Refused, match=r"before torch\.compile"):
        FirstNonFinite(torch.compile(nn.Linear(2, 2)))


def test_recomputed_modules_are_attributed_like_others() -> None:
    """A checkpoint ends its recomputation by an exception half way; the stack of modules survives it."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (x * 0).abs().sqrt()), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    model = nn.Sequential(nn.Linear(4, 4), Recomputed(), Recomputed())
    found = first(model)
    assert found is not None and (found.module, found.direction, found.role) == ("2.body.1", "backward", "producer")
