"""What is prepared of attention, without a second cache; caches that are too large."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from taxfree._runtime.arguments import usage_errors
from taxfree.errors import UsageError
from taxfree_kernels.flash_decode.signature import FLASH_DECODE
from taxfree_kernels.variant import problem_class
from tests.ranks import Ranks
from tests.taxfree.runtime_tasks import DECODE, record_of, runtime_of

OP = "flash_decode"
PAGED = {"page_size": 5, "soft_cap": True, "window": 30, "dtype": "bfloat16"}


def prepare_a_vast_cache(fabric: Any, variant: str, fields: dict[str, Any]) -> Any:
    vast = {"kv_len_per_rank": 1 << 34} | ({"page_size": 1 << 20} if fields else {})
    problem = problem_class(OP)(**DECODE | fields | vast, world_size=2)
    rt = runtime_of(fabric, record_of(fabric, problem, variant))
    rt.prepare([problem])
    return rt.choice(problem).variant


@pytest.mark.parametrize("fields", [{}, PAGED], ids=["dense", "paged"])
@pytest.mark.parametrize("variant", ["splits", "gather", "fine_wait", "fused"])
def test_preparing_takes_no_memory_for_a_second_cache(
    ranks: Ranks, variant: str, fields: dict[str, Any]
) -> None:
    task = f"{__name__}:prepare_a_vast_cache"
    assert ranks.run(2, task, variant=variant, fields=fields) == [variant] * 2


@pytest.mark.parametrize("paged", [False, True])
def test_keys_that_are_too_far_apart_for_32_bits_are_refused(paged: bool) -> None:
    fabric: Any = types.SimpleNamespace(world_size=2, device=torch.device("meta"))

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    far = torch.empty_strided(
        (2, 20, 1, 16), (16, 1 << 27, 16, 1), dtype=torch.float16, device="meta"
    )
    lengths = empty(2, 2, dtype=torch.int32)
    table = empty(2, 3, dtype=torch.int32) if paged else None
    near = empty(2, 20, 1, 16)
    arguments = empty(2, 2, 16), far, near, lengths, table, None, None, None
    with (
        pytest.raises(UsageError, match="the keys of k are 134217728 elements apart"),
        usage_errors(),
    ):
        FLASH_DECODE.problem(fabric, *arguments)
