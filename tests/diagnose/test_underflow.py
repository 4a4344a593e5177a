import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.diagnose.logits import AttentionLogits, max_logit
from workbench.diagnose.underflow import OutputGradients, UnderflowRow, exponent_counts, parameter_underflow, total
from workbench.errors import Refused


def row(values: Tensor) -> UnderflowRow:
    return UnderflowRow("x", exponent_counts(values).numpy())


def wide(n: int = 20_000) -> Tensor:
    """Magnitudes from 2^-60 to 2^30, signs and exact zeros included."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(n, generator=g) * torch.exp2(torch.rand(n, generator=g) * 90 - 60)
    values[:100] = 0.0
    return values


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-4, 2.0**40])
def test_shares_are_what_a_cast_to_fp16_does(scale: float) -> None:
    values = wide()
    cast = (values.double() * scale).to(torch.float16)
    kept, r = values != 0, row(values)
    assert r.zero == pytest.approx(float((~kept).double().mean()))
    assert r.flushed(scale) == pytest.approx(float((kept & (cast == 0)).double().mean()))
    tiny = (values.double() * scale).abs() < 2.0**-14
    assert r.subnormal(scale) == pytest.approx(float((tiny & (cast != 0)).double().mean()))
    beyond = (values.double() * scale).abs() >= 2.0**16
    assert r.overflowed(scale) == pytest.approx(float(beyond.double().mean()))


def test_every_float32_exponent_has_its_own_bin() -> None:
    exponents = torch.arange(-149, 128)
    histogram = row(torch.exp2(exponents.double()).float() * 1.0).histogram()
    assert histogram == {int(e): 1 for e in exponents}


def test_nonfinite_elements_are_counted_apart() -> None:
    r = row(torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0]))
    assert (r.elements, r.nonfinite, r.zero) == (5, 3, 0.5)


def test_gradients_that_still_carry_the_scale_give_the_same_report() -> None:
    model = nn.Linear(8, 4)
    model(torch.randn(16, 8)).square().sum().mul(1e-6).backward()
    plain = parameter_underflow(model)
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 2.0**12
    scaled = parameter_underflow(model, grads_scaled_by=2.0**12)
    assert [(r.layer, r.histogram()) for r in plain] == [(r.layer, r.histogram()) for r in scaled]
    assert total(plain).elements == 36


def test_a_scale_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(Refused, match="powers of two"):
        row(torch.ones(2)).flushed(3.0)


def test_fp16_backward_without_scaling_underflows_and_a_scale_restores_it() -> None:
    """Small gradients flow back in fp16: most of the first layer's vanish without a scale, next to none with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(64, 16)
    lost = {}
    for scale in (1.0, 2.0**16):
        model.zero_grad()
        with OutputGradients(model) as meter, torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean() * 1e-6
        (loss * scale).backward()
        lost[scale] = meter.rows(grads_scaled_by=scale)[0]
        assert lost[scale].layer == "0"
    assert lost[1.0].zero > 0.5
    assert lost[2.0**16].zero < 0.05


def test_the_meter_leaves_no_hook_when_an_exception_flies() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError), OutputGradients(model), AttentionLogits(model):
        model(torch.ones(3, 5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        mask = torch.zeros_like(scores).masked_fill_(torch.arange(scores.shape[-1]) == 0, -torch.inf)
        return torch.softmax(scores + (mask if self.kind == "masked" else 0), -1) @ v


@pytest.mark.parametrize("kind", ["sdpa", "eager", "masked"])
def test_the_largest_logit_is_named_by_layer_whatever_computes_attention(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": Attention(kind), "second": Attention(kind)})
    q, k, v = torch.randn(3, 2, 3, 700, 8)
    if kind == "masked":
        k[..., 0, :] = 0
    with AttentionLogits(model) as meter:
        model["first"](q, k, v)
        model["second"](q * 50, k, v)
    truth = float((q @ k.mT).abs().max()) * 8**-0.5
    rows = {r.module: r.max_logit for r in meter.rows()}
    assert rows == {"first": pytest.approx(truth, rel=1e-5), "second": pytest.approx(50 * truth, rel=1e-5)}


def test_grouped_query_heads_share_their_keys() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    expected = (q @ k.repeat_interleave(2, 1).mT).abs().max() * 0.5
    torch.testing.assert_close(max_logit(q, k, 0.5), expected)
