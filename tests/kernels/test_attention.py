"""What attention alone promises: log-sum-exps, packed sequences, strides, limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from taxfree_kernels.attention.operation import attention64
from taxfree_kernels.attention.plans import elements_with_lse, split
from taxfree_kernels.attention.problem import MOST_PACKED, Attention
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Ready, operation, variants
from tests.kernels.contract import complaints, unsupported_reasons
from tests.kernels.tasks import Case
from tests.ranks import Ranks, on_every_fabric
from tests.taxfree.runtime_tasks import record_of, runtime_of

FLASH, SPECIALIZED = (variants("attention")[name] for name in ("flash", "warp_specialized"))
SMALL = Attention(2, 37, 4, 2, 16)
PACKED = Attention(4, 60, 2, 1, 16, packed=True)
MAPPINGS = FLASH.space(SMALL, KNOWN["mi300x"])["MAPPING"]


def run(ranks: Ranks, task: Any, **arguments: Any) -> Any:
    return ranks.run(1, f"{task.__module__}:{task.__name__}", **arguments)[0]


def planned(fabric: Fabric, problem: Attention, variant: str, **config: Any) -> Any:
    found = variants("attention")[variant]
    default = found.seed_configs(problem, fabric.hardware)[0]
    return Ready(found.plan(problem, fabric, default | config))


def inputs_of(fabric: Fabric, problem: Attention) -> list[Any]:
    return list(operation("attention").make_inputs(problem, 0, 1, fabric.device))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# -- what runs on a rank -------------------------------------------------------------------------


def log_sum_exps(fabric: Fabric, variant: str, fields: dict[str, Any]) -> tuple[float, float]:
    """The largest errors of outputs and of log-sum-exps, by the runtime's method."""
    problem = Attention(
        **{"batch": 2, "length": 37, "q_heads": 4, "kv_heads": 2, "head_dim": 16} | fields
    )
    q, k, v, starts, _ = inputs_of(fabric, problem)
    rt = runtime_of(
        fabric, *([] if variant == "baseline" else [record_of(fabric, problem, variant)])
    )
    out, lse = rt.attention(
        q, k, v, causal=problem.causal, cu_seqlens=starts, scale=0.3, return_lse=True
    )
    assert rt.choice(problem).variant == variant
    assert lse.dtype == torch.float32
    expected, logs = attention64(problem, q, k, v, starts, 0.3)
    return error(out, expected), float((lse - logs.transpose(-1, -2)).abs().max())


def beside_nothing_finite(fabric: Fabric, **config: Any) -> float:
    """The error of a packed sequence whose neighbours are NaN."""
    q, k, v, _, _ = inputs_of(fabric, PACKED)
    starts = torch.tensor([0, 7, 7, 44, 60], dtype=torch.int32, device=fabric.device)
    expected = attention64(PACKED, q, k, v, starts)[0][7:44]
    for each in (q, k, v):
        each[:7], each[44:] = float("nan"), float("nan")
    out = torch.empty_like(q)
    planned(fabric, PACKED, "flash", **config)(q, k, v, starts, None, out)
    return error(out[7:44], expected)


def with_impossible_starts(fabric: Fabric, starts: list[int]) -> bool:
    """Whether memory around the tensors is as it was."""
    q, k, v, _, _ = inputs_of(fabric, PACKED)
    room = torch.full((3, *q.shape), 7.0, dtype=q.dtype, device=fabric.device)
    wanted = torch.tensor(starts, dtype=torch.int32, device=fabric.device)
    planned(fabric, PACKED, "flash")(q, k, v, wanted, None, room[1])
    return bool((room[0] == 7).all() and (room[2] == 7).all())


def of_one_projection(fabric: Fabric, **config: Any) -> float:
    """The error on views of one tensor [batch, length, q, k and v heads, head_dim]."""
    generator = torch.Generator(fabric.device).manual_seed(1)
    together = torch.randn(2, 37, 8, 16, generator=generator, device=fabric.device).half()
    q, k, v = together.split([4, 2, 2], dim=2)
    out = torch.empty(q.shape, dtype=q.dtype, device=fabric.device)
    plan = planned(fabric, SMALL, "flash", **config)
    plan(q.contiguous(), k, v, None, None, out)  # descriptors are made anew for other strides
    plan(q, k, v, None, None, out)
    return error(out, attention64(SMALL, q, k, v, None)[0])


def with_every_mapping(fabric: Fabric, problem: Attention, chiplets: int) -> list[float]:
    q, k, v, starts, _ = inputs_of(fabric, problem)
    expected, errors = attention64(problem, q, k, v, starts)[0], []
    for mapping in MAPPINGS:
        out = torch.full_like(q, float("nan"))
        planned(fabric, problem, "flash", MAPPING=mapping, XCDS=chiplets)(
            q, k, v, starts, None, out
        )
        errors.append(error(out, expected))
    return errors


# -- tests ---------------------------------------------------------------------------------------


@on_every_fabric
@pytest.mark.parametrize("variant", ["baseline", "flash"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": False, "head_dim": 64}, {"packed": True, "dtype": "bfloat16"}],
    ids=["causal", "full", "packed"],
)
def test_log_sum_exps_are_those_of_float64(ranks, variant, fields):
    of_output, of_logs = run(ranks, log_sum_exps, variant=variant, fields=fields)
    assert of_output < 0.01
    assert of_logs < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("fields", [{}, {"causal": False, "length": 300, "dtype": "bfloat16"}])
def test_warps_with_roles_are_right(ranks, head_dim, fields):
    usual = dataclasses.asdict(SMALL) | {"head_dim": head_dim} | fields
    del usual["world_size"]
    if unsupported_reasons(ranks, 1, "attention", usual)["warp_specialized"] is not None:
        pytest.skip("written for Hopper")
    cases = [
        Case("warp_specialized", usual | {"length": length}, padded=padded, op="attention")
        for length, padded in ((1, False), (usual["length"], True), (193, False))
    ]
    assert complaints(ranks, 1, cases) == []
    of_output, of_logs = run(ranks, log_sum_exps, variant="warp_specialized", fields=usual)
    assert of_output < 0.01
    assert of_logs < 1e-4


@on_every_fabric
@pytest.mark.parametrize("tma", [False, True])
def test_packed_sequences_do_not_see_their_neighbours(ranks, tma):
    assert run(ranks, beside_nothing_finite, TMA=tma) < 0.01


@pytest.mark.parametrize(
    "starts", [[0, 200, 400, 600, 800], [-50, 90, 3, -7, 60], [60, 40, 20, 0, 0]]
)
def test_impossible_starts_reach_no_other_memory(ranks, starts):
    assert run(ranks, with_impossible_starts, starts=starts)


@on_every_fabric
@pytest.mark.parametrize("tma", [False, True])
def test_operands_may_be_views_of_one_projection(ranks, tma):
    assert run(ranks, of_one_projection, TMA=tma) < 0.01


@pytest.mark.parametrize("problem", [SMALL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("chiplets", [1, 3])
def test_every_order_of_programs_computes_every_block(ranks, problem, chiplets):
    errors = run(ranks, with_every_mapping, problem=problem, chiplets=chiplets)
    assert len(errors) == 5
    assert max(errors) < 0.01


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"length": 0}, "length is 0"),
        ({"head_dim": 257}, "head_dim is 257, must be from 16 to 256"),
        ({"kv_heads": 3}, "q_heads=4 is not divisible by kv_heads=3"),
        ({"dtype": "float32"}, "float32 is not one of"),
        ({"batch": MOST_PACKED + 1, "packed": True}, "at most 4096 sequences"),
    ],
)
def test_impossible_dimensions_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(SMALL, **fields)


def test_the_cost_counts_what_queries_see():
    full, causal = (Attention(2, 100, 4, 2, 16, causal=each) for each in (False, True))
    assert full.cost.flops == 4 * 2 * 100 * 100 * 4 * 16
    assert causal.cost.flops == 4 * 2 * 100 * 50 * 4 * 16
    assert full.cost.memory_bytes == 2 * 2 * 100 * (4 + 2 + 2 + 4) * 16
    packed = Attention(2, 200, 4, 2, 16, causal=False, packed=True)
    assert packed.cost == full.cost


@pytest.mark.parametrize(
    ("device", "fields", "why"),
    [
        ("h200", {}, None),
        ("h200", {"packed": True}, "sequences are packed"),
        ("h200", {"head_dim": 70}, "multiples of 16 bytes"),
        ("mi300x", {}, "gfx942"),
        ("cpu", {}, "cpu"),
    ],
)
def test_warps_have_roles_on_hopper_alone(device, fields, why):
    problem = dataclasses.replace(SMALL, **fields)
    found = SPECIALIZED.unsupported_reason(problem, KNOWN[device])
    assert found is None if why is None else why in found


@pytest.mark.parametrize("head_dim", [15, 16])
def test_log_sum_exps_lie_behind_the_output(head_dim):
    q = torch.zeros(1, 3, 1, head_dim, dtype=torch.float16)
    flat = torch.zeros(elements_with_lse(q), dtype=q.dtype)
    out, lse = split(flat, q)
    out.fill_(1)
    assert lse is not None
    lse.fill_(2)
    assert (out == 1).all()
    assert out.shape == q.shape
    assert lse.shape == (1, 1, 3)
    assert lse.data_ptr() % 16 == flat.data_ptr() % 16


def test_an_output_holds_no_log_sum_exps():
    q = torch.zeros(1, 3, 1, 16, dtype=torch.float16)
    assert split(q.clone(), q)[1] is None
