"""Attention in fp32: what was asked for, and what the operators' own dtypes say."""

import pytest
import torch

from workbench.experiment.dtype_probe import operator_dtypes
from workbench.experiment.dtypes import CUDA_AUTOCAST, DtypesSeen, dtypes_seen
from workbench.report.numerics import autocast_table, dtype_table


@pytest.fixture(scope="module")
def seen() -> DtypesSeen:
    return dtypes_seen("cpu")


def test_converting_the_module_inside_autocast_leaves_its_products_in_half(seen: DtypesSeen) -> None:
    alone, converted, by_rule = seen.ways
    assert not alone.holds and not converted.holds and by_rule.holds
    assert converted.operators == alone.operators
    attention = next(name for name in alone.operators if "attention" in name)
    assert converted.operators[attention] == ["float16"] and converted.operators["addmm"] == ["float16"]
    assert {dtype for dtypes in by_rule.operators.values() for dtype in dtypes} == {"float32"}


def test_the_table_says_which_way_holds(seen: DtypesSeen) -> None:
    rows = dtype_table(seen).rows
    assert [row[-1] for row in rows] == ["failed", "failed", "passed"]
    assert "float16: " in rows[1][1] and "float16" not in rows[2][1]


def test_operators_are_measured_here_and_compared_with_cudas_list(seen: DtypesSeen) -> None:
    assert seen.autocast == operator_dtypes(torch.device("cpu"))
    assert list(seen.autocast) == list(CUDA_AUTOCAST)
    marks = {row[0]: row[-1] for row in autocast_table(seen).rows}
    assert {name for name, mark in marks.items() if mark} == {
        name for name in CUDA_AUTOCAST if seen.autocast[name] != CUDA_AUTOCAST[name]
    }
    assert not marks["linear"] and marks["softmax"] == marks["layer_norm"] == marks["sum"] == "differs"
