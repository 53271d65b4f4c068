"""What is prepared of attention, without a second cache; caches that are too large."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from taxfree import problems
from taxfree.errors import UsageError
from taxfree_kernels.variant import problem_class
from tests.ranks import Ranks
from tests.taxfree.runtime_tasks import DECODE, record_of, runtime_of

OP = "flash_decode"
PAGED = {"page_size": 5, "soft_cap": True, "window": 30, "dtype": "bfloat16"}


def problem_of(fields: dict[str, Any]) -> Any:
    return problem_class(OP)(**DECODE, **fields, world_size=2)


def prepare_without_a_cache(fabric: Any, variant: str, fields: dict[str, Any]) -> Any:
    from unittest import mock

    from taxfree_kernels.flash_decode.operation import OPERATION

    forbidden = dataclasses.replace(OPERATION, make_inputs=mock.Mock(side_effect=AssertionError))
    problem = problem_of(fields)
    rt = runtime_of(fabric, record_of(fabric, problem, variant))
    with mock.patch("taxfree.runtime.operation", return_value=forbidden):
        rt.prepare([problem])
    return rt.choice(problem).variant


def launched(problem: Any, variant: str, found: Any) -> list[Any]:
    """What a call on H200 launches, with what kernels depend on."""
    from unittest import mock

    from taxfree_kernels import variant as registry
    from taxfree_kernels.compiled.record import record
    from taxfree_kernels.hardware import KNOWN

    config = registry.variants(OP)[variant].first_configs(problem, KNOWN["h200"])[0]
    with mock.patch.object(registry, "operation", return_value=found):
        launches = record(OP, variant, problem, config, KNOWN["h200"])
    return [(each.name, [getattr(arg, "dtype", arg) for arg in each.args]) for each in launches]


@pytest.mark.parametrize("fields", [{}, PAGED], ids=["dense", "paged"])
@pytest.mark.parametrize("variant", ["library", "gather", "fine_wait", "fused", "two_shot"])
def test_preparing_takes_no_memory_for_a_second_cache(
    ranks: Ranks, variant: str, fields: dict[str, Any]
) -> None:
    task = f"{__name__}:prepare_without_a_cache"
    assert ranks.run(2, task, variant=variant, fields=fields) == [variant] * 2


@pytest.mark.parametrize("fields", [{}, PAGED], ids=["dense", "paged"])
@pytest.mark.parametrize("variant", ["gather", "fine_wait", "fused", "persistent", "two_shot"])
def test_what_is_prepared_is_what_a_call_launches(variant: str, fields: dict[str, Any]) -> None:
    from taxfree_kernels.flash_decode.operation import OPERATION, compile_inputs

    def make_inputs(problem: Any, rank: int, seed: int, device: torch.device) -> Any:
        return compile_inputs(problem, device)

    prepared = dataclasses.replace(OPERATION, make_inputs=make_inputs)
    problem = problem_of(fields)
    calls = launched(problem, variant, OPERATION)
    assert calls
    assert launched(problem, variant, prepared) == calls


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
    with pytest.raises(UsageError, match="the keys of k are 134217728 elements apart"):
        problems.flash_decode(fabric, empty(2, 2, 16), far, near, lengths, table, None, None, None)
