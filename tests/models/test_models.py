import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from workbench.errors import Refused
from workbench.models.build import build_model
from workbench.models.config import VITS, check_model, default_patch_size, vit_config
from workbench.planner.params import num_parameters

SMALL = {"num_classes": 10, "image_size": 8, "in_channels": 1}


@pytest.mark.parametrize("name", VITS)
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "registers": 4}])
def test_formula_counts_every_parameter(name: str, fields: dict[str, int]) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes=1000, image_size=224, in_channels=3, **fields)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("vit-l", 0.304), ("vit-1b", 1), ("vit-3b", 3), ("vit-10b", 10), ("vit-22b", 22), ("vit-32b", 32)],
)
def test_names_say_the_size(name: str, billions: float) -> None:
    assert num_parameters(vit_config(name)) / 1e9 == pytest.approx(billions, rel=0.05)


def test_fused_attention_computes_what_eager_attention_does() -> None:
    torch.manual_seed(0)
    eager = build_model("vit-nano", **SMALL, attention="eager", qk_norm=True, registers=3)
    fused = build_model("vit-nano", **SMALL, attention="sdpa", qk_norm=True, registers=3)
    torch.nn.init.normal_(eager.head.weight)  # type: ignore[union-attr, arg-type]
    fused.load_state_dict(eager.state_dict())
    images = torch.randn(3, 1, 8, 8)
    assert torch.allclose(eager(images), fused(images), atol=1e-5)


def test_registers_and_gelu_change_the_model_and_not_its_output_shape() -> None:
    for fields in ({"registers": 4}, {"gelu": "tanh"}):
        assert build_model("vit-nano", **SMALL, **fields)(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_the_small_resnet_takes_any_image(size: int) -> None:
    model = build_model("resnet-small", num_classes=7, image_size=size, in_channels=3)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 7)
    assert model.get_submodule("layer4.conv1")


@pytest.mark.parametrize("size", range(1, 65))
def test_a_default_patch_always_divides_the_image(size: int) -> None:
    assert size % default_patch_size(size) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit-tiyn", "vit-tiny"),
        ("vit_l", "vit-l"),
        ("", "choose from"),
        ("a b:c", "registered"),
        ("timm:", "registered"),
    ],
)
def test_a_model_that_nothing_could_build_is_refused_with_the_nearest_names(name: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        check_model(name)


@pytest.mark.parametrize(
    ("field", "value", "said"), [("widht", 8, "width"), ("width", 30, "heads"), ("patch_size", 3, "patch_size")]
)
def test_a_shape_that_does_not_fit_is_refused(field: str, value: int, said: str) -> None:
    with pytest.raises(Refused, match=said):
        vit_config("vit-nano", image_size=8, **{field: value})


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_models.py").write_text(
        "from torch import nn\n"
        "def linear(num_classes, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, num_classes))\n"
        "def broken(num_classes):\n    return 'a string'\n"
        "def picky(depth):\n    return nn.Linear(depth, 1)\n"
        "constant = 3\n"
    )
    (tmp_path / "their_broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("their_models", None)
    return "their_models"


def test_a_factory_gets_of_the_datas_arguments_those_it_takes(factories: str) -> None:
    model = build_model(f"{factories}:linear", **SMALL)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("their_models:liner", {}, "linear"),
        ("no_such_module:f", {}, "no_such_module"),
        ("their_broken_module:f", {}, "ZeroDivisionError"),
        ("builtins:print", {}, "NoneType"),
        ("builtins:dict", {}, "Python"),
        ("their_models:broken", {}, "str"),
        ("their_models:constant", {}, "function or class"),
        ("their_models:linear", {"widht": 1}, "widht"),
        ("their_models:picky", {}, "depth"),
        ("__main__:mine", {}, "notebook"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused_by_name(
    factories: str, name: str, arguments: dict[str, int], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        build_model(name, **SMALL, **arguments)


@pytest.mark.parametrize(("name", "extra"), [("timm:resnet18", "timm"), ("hf:vit", "hf")])
def test_a_missing_library_is_named_with_its_extra(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Refused, match=rf"'\.\[{extra}\]'"):
        build_model(name, **SMALL)


def test_an_attention_function_can_be_given_itself() -> None:
    seen: list[tuple[int, ...]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(q.shape))
        return v

    model = build_model("vit-nano", **SMALL, attention=attention)
    model(torch.randn(3, 1, 8, 8))
    tokens = model.config.num_tokens  # type: ignore[union-attr]
    assert seen == [(3, 4, tokens, 16)] * 4


@pytest.mark.parametrize("shape", [(1, 9, 9), (3, 8, 8), (1, 8, 4)])
def test_images_of_another_shape_are_refused_and_not_cropped(shape: tuple[int, int, int]) -> None:
    model = build_model("vit-nano", **SMALL)
    with pytest.raises(Refused, match=r"\(1, 8, 8\)"):
        model(torch.randn(2, *shape))


def test_a_library_that_breaks_on_import_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(Refused, match="nms"):
        build_model("timm:resnet18", **SMALL)


class _Config:
    """As transformers' configurations do, keeps every keyword without a word."""

    def __init__(self, **fields: object) -> None:
        self.fields = {"num_labels": 2, "num_channels": 3, "image_size": 224, "patch_size": 16, **fields}

    def to_dict(self) -> dict[str, object]:
        return self.fields


class _Classifier(torch.nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        size, channels = config.fields["image_size"], config.fields["num_channels"]
        self.head = torch.nn.Linear(channels * size**2, config.fields["num_labels"])  # type: ignore[operator]

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(pixel_values.flatten(1)))


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three calls of the library that the adapter makes."""

    def for_model(kind: str, **fields: object) -> _Config:
        if kind != "vit":
            raise ValueError(f"Unrecognized model identifier: {kind}")
        return _Config(**fields)

    library = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=for_model),
        AutoModelForImageClassification=SimpleNamespace(from_config=_Classifier),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)  # type: ignore[arg-type]


def test_a_transformers_model_is_built_for_the_data_and_gives_logits(transformers: None) -> None:
    model = build_model("hf:vit", **SMALL)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [("hf:vit", {"hiden_size": 8}, "hiden_size"), ("hf:vitt", {}, "vitt"), ("hf:vit", {"num_labels": 0.5}, "built")],
)
def test_what_transformers_would_swallow_or_choke_on_is_refused(
    transformers: None, name: str, arguments: dict[str, int], said: str
) -> None:
    with pytest.raises(Refused, match=said):
        build_model(name, **SMALL, **arguments)


EVERYTHING = {"grid_2d": {"radius": 9}, "full": {}, "adaptive": {"mass": 1.0}, "local": {"radius": 9}}


@pytest.mark.parametrize("pattern", EVERYTHING)
@pytest.mark.parametrize("registers", [0, 2])
def test_a_pattern_that_sees_everything_computes_dense_attention_whatever_order_its_tokens_take(
    pattern, registers
) -> None:
    shape = {"num_classes": 10, "image_size": 8, "in_channels": 1, "patch_size": 1, "registers": registers}
    logits = []
    for name, options in (("sdpa", {}), (pattern, {"block_size": 16, **EVERYTHING[pattern]})):
        torch.manual_seed(0)
        model = build_model("vit-nano", **shape, attention=name, attention_args=options)
        torch.nn.init.normal_(model.head.weight)
        logits.append(model(torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_2d_window_sees_neighbours_in_both_directions_and_nothing_else() -> None:
    """Of one layer without a global token in the way: which pixels does a patch's output depend on?"""
    shape = {"num_classes": 10, "image_size": 16, "in_channels": 1, "patch_size": 1, "depth": 1}
    args = {"block_size": 16, "radius": 1}
    model = build_model("vit-nano", **shape, attention="grid_2d", attention_args=args)
    seen: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    image = torch.randn(1, 1, 16, 16, requires_grad=True)
    model(image)
    first = int((model.order == 1).nonzero())  # the patch at the upper left corner, in tile order
    (gradient,) = torch.autograd.grad(seen[0][0, first].sum(), image)
    near = torch.zeros(16, 16, dtype=torch.bool)
    near[:8, :8] = True  # its tile of 4 × 4 patches and those that touch it
    assert torch.equal(gradient[0, 0] != 0, near)


def test_attention_options_that_fit_nothing_are_refused() -> None:
    shape = {"num_classes": 10, "image_size": 8, "in_channels": 1}
    for attention, args, word in (
        ("sdpa", {"radius": 1}, "attention_args"),
        ("local", {"radus": 1}, "radius"),
        ("windw_global", {}, "window_global"),
    ):
        with pytest.raises(Refused, match=word):
            build_model("vit-nano", **shape, attention=attention, attention_args=args)
