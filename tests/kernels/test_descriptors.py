"""Descriptors of the kernels lowered for Hopper, which are filled in from a form kept per shape."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workbench.kernels.gluon_backward import QUERIES, sums_of
from workbench.kernels.gluon_common import tiles_of

ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
SUMS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def fields(descriptor):
    """All that a launch reads of a descriptor, its tensor as an address."""
    described = dict(vars(descriptor))
    base = described.pop("base")
    return described | {"address": base.data_ptr(), "dtype": base.dtype, "device": base.device}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_descriptor_from_a_form_is_the_one_made_directly(dtype, head_dim):
    packed = torch.zeros(2, 256, 3, 4, head_dim, dtype=dtype)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    for x in (query, key, value, query.contiguous(), query[1:]):
        for rows in (64, 128):
            direct = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, head_dim], ROWS)
            assert fields(tiles_of(x, rows)) == fields(direct)


def test_sums_are_described_as_rows_of_one_head():
    x = torch.zeros(2, 4, 256)
    direct = TensorDescriptor(x, [8, 256], [256, 1], [1, QUERIES], SUMS)
    assert fields(sums_of(x)) == fields(direct)


def test_tensors_of_one_shape_have_descriptors_of_their_own():
    first, second = torch.zeros(2, 1, 4, 256, 64, dtype=torch.bfloat16)
    one, other = tiles_of(first), tiles_of(second)
    assert one.base.data_ptr() == first.data_ptr() and other.base.data_ptr() == second.data_ptr()


def test_what_the_copy_engine_cannot_address_is_copied_first():
    shifted = torch.zeros(4 * 256 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 4, 256, 64)
    assert shifted.data_ptr() % 16 and tiles_of(shifted).base.data_ptr() % 16 == 0
    turned = torch.zeros(1, 4, 64, 256, dtype=torch.bfloat16).transpose(2, 3)
    assert tiles_of(turned).strides[-1] == 1
