"""Names as the drivers give them."""

import tomllib

import pytest

from workbench.hardware.probe import PEAKS, PRECISIONS, datasheet


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA H200 NVL", 836, 4800),
        ("NVIDIA GH200 480GB", 989, 4000),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI250X", 191.5, 1638),
    ],
)
def test_a_device_is_found_by_its_own_name(name: str, bf16: float, bandwidth: float) -> None:
    entry = datasheet(name)
    assert entry is not None
    assert (entry["bf16"], entry["bandwidth"]) == (bf16, bandwidth)


def test_an_older_part_has_no_rate_for_a_dtype_it_has_no_units_for() -> None:
    entry = datasheet("Tesla V100-SXM2-32GB")
    assert entry is not None and entry["fp16"] == 125 and "bf16" not in entry


@pytest.mark.parametrize("name", ["NVIDIA H20", "Quadro P400", "", "NVIDIA L4"])
def test_a_part_that_is_not_in_the_table_is_left_to_measurement(name: str) -> None:
    assert datasheet(name) is None


def test_every_entry_can_be_reached_and_is_whole() -> None:
    for entry in tomllib.loads(PEAKS.read_text())["gpu"]:
        assert datasheet(entry["name"]) == entry
        assert set(entry) <= {"name", "bandwidth", *PRECISIONS} and "fp32" in entry
