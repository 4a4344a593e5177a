"""Per-layer precision: what the operators themselves compute in, under everything that wraps a model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.diagnose.ranks import run_ranks
from workbench.errors import Refused
from workbench.trainer.module_precision import apply_precision, dtype_report, match_rules

RULES = {"default": "fp16", "blocks.*.attn": "fp32", "norm": "fp32"}


class Attn(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attn(width)
        self.mlp, self.recompute = nn.Sequential(nn.Linear(width, width), nn.GELU()), recompute

    def body(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Net(nn.Module):
    def __init__(self, recompute: bool = False, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def net(recompute: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(recompute)


def dtypes_of(model: nn.Module, batch: Tensor, rules: dict[str, str]) -> dict[str, set[str]]:
    return {row.module: set(row.dtypes) for row in dtype_report(model, batch, rules)}


def test_operators_inside_a_matched_module_run_in_its_dtype(batch: Tensor) -> None:
    model = net()
    apply_precision(model, RULES, "cpu")
    report = {row.module: row for row in dtype_report(model, batch, RULES)}
    assert set(report) == {"", *(f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn", "norm1"))}
    assert set(report["blocks.0.attn"].dtypes) == {"float32"}
    assert {"addmm", "bmm", "_softmax"} <= set(report["blocks.1.attn"].operators)
    assert report[""].operators["addmm"] == {"float16": 3}
    assert all(row.holds for row in report.values())


def test_moving_a_module_to_fp32_inside_autocast_does_not_make_it_compute_in_fp32(batch: Tensor) -> None:
    class Wrong(Attn):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    rules = {"blocks.*.attn": "fp32"}
    model = net()
    for block in model.blocks:
        wrong = Wrong(8)
        wrong.load_state_dict(block.attn.state_dict())
        block.attn = wrong.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        wrong_way = dtype_report(model, batch, rules)
        output = model.blocks[0].attn(batch)
    assert output.dtype == torch.float16
    assert [row.holds for row in wrong_way] == [False, False]
    assert all("float16" in row.operators["addmm"] for row in wrong_way)
    right = net()
    apply_precision(right, rules, "cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        assert all(row.holds for row in dtype_report(right, batch, rules))


def test_fp32_attention_under_fp16_equals_fp32_attention_of_the_same_input(batch: Tensor) -> None:
    model, plain = net(), net()
    apply_precision(model, {"blocks.*.attn": "fp32"}, "cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        out = model.blocks[0].attn(batch.half())
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, plain.blocks[0].attn(batch.half().float()).half(), rtol=0, atol=0)


def test_a_half_precision_rule_inside_an_fp32_model(batch: Tensor) -> None:
    model = net()
    rules = {"blocks.0": "bf16"}
    apply_precision(model, rules, "cpu")
    assert model(batch).dtype == torch.float32
    (row,) = dtype_report(model, batch, rules)
    assert row.holds and row.operators["addmm"] == {"bfloat16": 3}


def test_a_module_that_never_ran_proves_nothing(batch: Tensor) -> None:
    model = net()
    model.add_module("unused", nn.Linear(2, 2))
    apply_precision(model, {"unused": "fp32"}, "cpu")
    (row,) = dtype_report(model, batch, {"unused": "fp32"})
    assert row.operators == {} and not row.holds


def test_nested_and_keyword_inputs_are_cast_and_integers_left_alone() -> None:
    seen = {}

    class Odd(nn.Module):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: Tensor, name: str) -> dict[str, object]:
            seen.update(a=pair[0].dtype, b=pair[1]["b"].dtype, ids=pair[1]["ids"].dtype, scale=scale.dtype)
            return {"out": [pair[0] * scale], "ids": pair[1]["ids"], "name": name, "none": None}

    model = nn.ModuleDict({"odd": Odd()})
    apply_precision(model, {"Odd": "fp32"}, "cpu")
    half, ids = torch.ones(2, dtype=torch.float16), torch.arange(2)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model["odd"]((half, {"b": half, "ids": ids}), scale=half, name="x")
    assert seen == {"a": torch.float32, "b": torch.float32, "ids": torch.int64, "scale": torch.float32}
    assert out["out"][0].dtype == torch.float16 and out["ids"].dtype == torch.int64 and out["name"] == "x"


def test_gradients_reach_weights_and_inputs_through_the_casts(batch: Tensor) -> None:
    model = net()
    apply_precision(model, RULES, "cpu")
    model(batch.requires_grad_()).float().square().sum().backward()
    assert batch.grad is not None and batch.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_last_matching_rule_wins_and_a_nested_rule_holds_inside() -> None:
    model = net()
    assert match_rules(model, {"Linear": "fp32", "blocks.*.mlp.0": "bf16"})["blocks.1.mlp.0"] == "bf16"
    assert match_rules(model, {"blocks.*.mlp.0": "bf16", "Linear": "fp32"})["blocks.1.mlp.0"] == "fp32"
    nested = match_rules(model, {"blocks.0": "fp32", "blocks.0.mlp*": "bf16"})
    # The parts of the MLP need no region of their own: the one around them has the same dtype.
    assert nested == {"blocks.0": "fp32", "blocks.0.mlp": "bf16"}


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    for pattern, near in (("blocks.*.atn", "blocks.0.attn"), ("LayrNorm", "LayerNorm")):
        with pytest.raises(Refused, match=near):
            apply_precision(net(), {pattern: "fp32"}, "cpu")
    with pytest.raises(Refused, match="fp32, bf16, fp16"):
        apply_precision(net(), {"blocks.*.attn": "float32"}, "cpu")
    with pytest.raises(Refused, match="keep the weights in fp32"):
        apply_precision(net().half(), {"blocks.*.attn": "fp32"}, "cpu")


def test_refused_rules_change_nothing_and_removed_rules_leave_nothing(batch: Tensor) -> None:
    model = net()
    before, keys = model(batch), list(model.state_dict())
    handle = apply_precision(model, RULES, "cpu")
    assert list(model.state_dict()) == keys and not torch.equal(model(batch), before)
    with pytest.raises(Refused, match="remove"):
        apply_precision(model, RULES, "cpu")
    handle.remove()
    assert torch.equal(model(batch), before) and "forward" not in model.blocks[0].attn.__dict__


def test_a_copy_of_the_model_computes_with_its_own_weights(batch: Tensor) -> None:
    model = net()
    apply_precision(model, RULES, "cpu")
    twin = copy.deepcopy(model)
    before = model(batch)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(twin(batch), torch.zeros_like(before)) and torch.equal(model(batch), before)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    run(batch).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("outer", [False, True], ids=["default rule", "autocast around"])
def test_compiled_without_a_graph_break_it_computes_the_same(batch: Tensor, outer: bool) -> None:
    model = net()
    apply_precision(model, RULES if not outer else {k: v for k, v in RULES.items() if k != "default"}, "cpu")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=outer):
                return f(x)

        return call

    expected, got = gradients(model, run(model), batch), gradients(model, run(compiled), batch)
    assert run(compiled)(batch).dtype == run(model)(batch).dtype
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g, e, rtol=2e-3, atol=2e-3)


def test_a_compiled_model_keeps_fp32_inside(batch: Tensor) -> None:
    """The graph that the compiler gets holds fp32 products for attention and half ones for the rest."""
    seen: dict[str, set[torch.dtype]] = {}

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and isinstance(node.target, torch._ops.OpOverload):
                seen.setdefault(node.target.overloadpacket.__name__, set()).add(value.dtype)
        return graph

    model = net()
    apply_precision(model, RULES, "cpu")
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(batch)
    assert seen["bmm"] == seen["_softmax"] == {torch.float32}
    assert seen["addmm"] == {torch.float32, torch.float16}


def test_recomputation_runs_in_the_dtypes_of_the_first_forward(batch: Tensor) -> None:
    stored, recomputed = net(), net(recompute=True)
    for model in (stored, recomputed):
        apply_precision(model, RULES, "cpu")
    for e, g in zip(gradients(stored, stored, batch), gradients(recomputed, recomputed, batch), strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)


def _wrapped(rank: int) -> dict[str, tuple[bool, float]]:
    """For each wrapper: whether the rules hold inside, and the distance of its gradients from the plain model's."""
    half = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0)).chunk(2)[rank]
    whole = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0))
    plain = net()
    apply_precision(plain, RULES, "cpu")
    expected = gradients(plain, plain, whole)
    outcome = {}
    for kind in ("ddp", "fsdp2", "fsdp2, rules after"):
        model: nn.Module = net()
        if kind != "fsdp2, rules after":
            apply_precision(model, RULES, "cpu")
        rules, run = RULES, model
        if kind == "ddp":
            run = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if kind == "fsdp2, rules after":
            apply_precision(model, RULES, "cpu")
        got = gradients(model, run, half)
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in got]
        distance = max(float((g - e).abs().max()) for g, e in zip(full, expected, strict=True))
        outcome[kind] = (all(row.holds for row in dtype_report(model, half, rules)), distance)
    return outcome


def test_rules_hold_under_ddp_and_fsdp2() -> None:
    for outcome in run_ranks(_wrapped):
        for kind, (holds, distance) in outcome.items():
            assert holds, kind
            assert distance < 1e-3, (kind, distance)
