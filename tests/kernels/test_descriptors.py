"""Tensor descriptors that are made without Triton's constructor are those that it makes."""

from __future__ import annotations

import weakref

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from taxfree_kernels.launch import OperandDescriptors, RowDescriptors, weight_descriptors

BOX = [1, 16, 32]


def fields(descriptor: TensorDescriptor) -> dict:
    """All of a descriptor, with the address in the place of its tensor."""
    others = {name: value for name, value in vars(descriptor).items() if name != "base"}
    return others | {"address": descriptor.base.data_ptr(), "dtype": descriptor.base.dtype}


def rows(count: int = 8, pitch: int = 64, offset: int = 0) -> torch.Tensor:
    """[count, 64], a view of rows so many elements apart."""
    memory = torch.arange(offset + count * pitch, dtype=torch.float16)
    return memory[offset:].view(count, pitch)[:, :64]


@pytest.mark.parametrize("is_nk", [True, False])
@pytest.mark.parametrize("sources", [1, 4])
def test_a_weight_is_described_as_the_constructor_does(is_nk, sources):
    descriptors = weight_descriptors(sources, BOX, is_nk)
    for _ in range(3):  # the first is, the others remember
        weight = torch.zeros(24, 64, dtype=torch.float16) if is_nk else rows()
        k, n = (64, 24) if is_nk else (8, 64)
        columns = k // sources
        shape = [sources, n, columns] if is_nk else [sources, columns, n]
        strides = [columns, 64, 1] if is_nk else [columns * 64, 64, 1]
        expected = TensorDescriptor(weight, shape, strides, BOX)
        assert fields(descriptors(weight.t() if is_nk else weight)) == fields(expected)


@pytest.mark.parametrize("pitches", [(64, 64), (64, 72, 64), (72, 64)])
def test_rows_are_described_anew_when_their_strides_change(pitches):
    descriptors = RowDescriptors([1, 1, 16, 32])
    for pitch in pitches:
        a = rows(pitch=pitch)
        strides = [a.numel(), a.numel(), pitch, 1]
        expected = TensorDescriptor(a, [1, 1, 8, 64], strides, [1, 1, 16, 32])
        assert fields(descriptors(a)) == fields(expected)


@pytest.mark.parametrize("odd", [rows(offset=1), rows(pitch=65)], ids=["start", "pitch"])
def test_odd_views_are_copied_each_time(odd):
    descriptors = RowDescriptors([1, 1, 16, 32])
    even = rows()
    for matrix in (even, odd, odd, even):
        described = descriptors(matrix)
        assert described.base.data_ptr() % 16 == 0
        assert described.strides[2:] == [64, 1]
        assert torch.equal(described.base, matrix)
    assert described.base.data_ptr() == even.data_ptr()


def test_the_constructor_runs_once_and_no_matrix_is_kept():
    made = []

    def describe(matrix):
        made.append(None)
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [16, 32])

    descriptors = OperandDescriptors(describe)
    matrices = [rows() for _ in range(3)]
    alive = [weakref.ref(matrix) for matrix in matrices]
    for matrix in matrices:
        descriptors(matrix)
    del matrix, matrices
    assert len(made) == 1
    assert not any(each() is not None for each in alive)


def test_rows_may_be_more_or_fewer_in_each_call():
    descriptors = RowDescriptors([1, *BOX])
    for count in (8, 3, 8, 5):
        matrix = rows(count)
        expected = TensorDescriptor(
            matrix, [1, 1, count, 64], [count * 64, count * 64, 64, 1], [1, *BOX]
        )
        assert fields(descriptors(matrix)) == fields(expected)
