"""Rows of parts as integers of 16 bits, two in a word."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from taxfree_kernels.flash_decode.exchange import _packed, _unpacked

ROWS, WIDTH = 4, 16


@triton.jit
def _there_and_back(rows_ptr, out_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    words, unit = _packed(tl.load(rows_ptr + at))
    tl.store(out_ptr + at, tl.reshape(_unpacked(words), (ROWS, WIDTH)) * unit[:, None])


def there_and_back(rows: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(rows, 7.0)
    _there_and_back[(1,)](rows, out, ROWS, WIDTH)
    return out


@pytest.mark.parametrize("magnitude", [1e-25, 1.0, 1e34])
def test_values_are_off_by_half_a_unit_of_their_row_at_most(magnitude):
    torch.manual_seed(0)
    rows = torch.randn(ROWS, WIDTH) * torch.tensor([1.0, 1e-3, 5.0, 1e3])[:, None] * magnitude
    unit = rows.abs().amax(1, keepdim=True) / 32767
    assert ((there_and_back(rows) - rows).abs() <= 0.501 * unit).all()


def test_the_largest_of_either_sign_stay_what_they_are():
    rows = torch.zeros(ROWS, WIDTH)
    rows[:, 3], rows[:, 8] = 2.5, -2.5
    torch.testing.assert_close(there_and_back(rows), rows)


def test_rows_of_zeros_or_nearly_so_are_zeros():
    rows = torch.zeros(ROWS, WIDTH)
    rows[1] = 1e-38
    assert torch.equal(there_and_back(rows), torch.zeros(ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the test is about
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan(value):
    rows = torch.ones(ROWS, WIDTH)
    rows[2, 5] = value
    found = there_and_back(rows)
    assert found[2].isnan().all()
    assert (found[[0, 1, 3]] == 1).all()
