"""Runtime.flash_decode on two real ranks of the host fabric."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from taxfree import problems
from taxfree.errors import UsageError
from taxfree.group import WorkerGroup

OP, WORLD = "flash_decode", 2
FIELDS = {"batch": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20}
PAGED = {"page_size": 5, "soft_cap": True, "window": 30, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerGroup]:
    with WorkerGroup(WORLD, "host", 4 << 20, 10.0) as group:
        yield group


def run(ranks: WorkerGroup, scenario: str, **arguments: Any) -> list[Any]:
    return ranks.call(f"{__name__}:on_rank", 60.0, scenario=scenario, **arguments)


def on_rank(fabric: Any, scenario: str, **arguments: Any) -> Any:
    return globals()[scenario](fabric, **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


def problem_of(**changes: Any) -> Any:
    from taxfree_kernels.variant import problem_class

    return problem_class(OP)(**FIELDS, world_size=WORLD, **changes)


def tensors_of(fabric: Any, problem: Any) -> tuple[Any, torch.Tensor]:
    from taxfree_kernels.variant import operation

    found = operation(OP)
    inputs = found.make_inputs(problem, fabric.rank, 1, fabric.device, integers=True)
    reference = found.reference(problem, fabric.rank, 1, fabric.device, integers=True)
    return inputs, reference.to(inputs[0].dtype)


def runtime_of(fabric: Any, problem: Any, variant: str = "persistent") -> Any:
    import taxfree.ops  # noqa: F401  registers the torch ops
    from taxfree import identity
    from taxfree.runtime import Runtime
    from taxfree_kernels.variant import variants
    from taxfree_tuning_db import Measurement, Record

    def measured(name: str, config: dict[str, Any], us: float) -> Measurement:
        hashes = identity.kernel_hashes(OP)
        return Measurement(name, config, hashes[name], {"eager": us}, {"eager": 0.0}, 1, None)

    config = variants(OP)[variant].first_configs(problem, fabric.hardware)[0]
    record = Record(
        op=OP, problem=dataclasses.asdict(problem),
        hardware=identity.hardware_fingerprint(fabric.hardware),
        software=identity.software_fingerprint(),
        winner=measured(variant, config, 1.0), baseline=measured("baseline", {}, 2.0),
        runners_up=(), trials=1, seconds_spent=0.0, provenance={"source": "user"},
    )  # fmt: skip
    return Runtime.on_fabric(fabric, [record])


def call_fused(fabric: Any, fields: dict[str, Any]) -> Any:
    problem = problem_of(**fields)
    rt = runtime_of(fabric, problem)
    (q, k, v, kv_lens, table, scaling), expected = tensors_of(fabric, problem)
    cap = float(scaling[1]) if problem.soft_cap else None
    options: dict[str, Any] = {
        "scale": float(scaling[0]),
        "soft_cap": cap,
        "window": problem.window or None,
    }
    out = torch.empty_like(expected)
    right = [torch.equal(rt.flash_decode(q, k, v, kv_lens, table, **options), expected)]
    options["window"] = problem.window or 1 << 40  # which leaves out no key, like none
    right.append(rt.flash_decode(q, k, v, kv_lens, table, **options, out=out) is out)
    right.append(torch.equal(out, expected))
    rt.check()
    return all(right), rt.choice(problem).variant, list(rt.stats().values())


def call_with_defaults(fabric: Any) -> float:
    """The error of a call without a scale, on random data."""
    from taxfree_kernels.variant import operation

    problem, found = problem_of(), operation(OP)
    rt = runtime_of(fabric, problem)
    q, k, v, kv_lens, _, _ = found.make_inputs(problem, fabric.rank, 1, fabric.device)
    expected = found.reference(problem, fabric.rank, 1, fabric.device)
    return float((rt.flash_decode(q, k, v, kv_lens).double() - expected).abs().max())


def call_compiled(fabric: Any) -> Any:
    problem = problem_of()
    rt = runtime_of(fabric, problem)
    (q, k, v, kv_lens, _, _), expected = tensors_of(fabric, problem)

    out = torch.empty_like(expected)

    def model(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rt.flash_decode(q, k, v, kv_lens, scale=1.0)  # unused, and yet the peers expect it
        rt.flash_decode(q, k, v, kv_lens, scale=1.0, out=out)
        return out * 2

    rt.prepare([problem])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    right = torch.equal(compiled(q, out), expected * 2) and torch.equal(out, expected)
    return right, list(rt.stats().values())


def call_badly(fabric: Any, what: str) -> str:
    problem = problem_of()
    rt = runtime_of(fabric, problem)
    (q, k, v, kv_lens, _, _), _ = tensors_of(fabric, problem)
    table = torch.zeros(2, 4, dtype=torch.int32)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "kv_lens": kv_lens}
    arguments |= {
        "dtype": {"q": q.float()},
        "q": {"q": q[0]},
        "k": {"k": k[0]},
        "v": {"v": v[:, 1:]},
        "heads": {"q": q[:, :, 1:]},
        "strides": {"k": k.repeat_interleave(2, 3)[..., ::2]},
        "group": {"q": q, "k": k.repeat(1, 1, 2, 1), "v": v.repeat(1, 1, 2, 1)},
        "batch": {"k": k[:1], "v": v[:1]},
        "lengths": {"kv_lens": kv_lens[0]},
        "long lengths": {"kv_lens": kv_lens.long()},
        "table": {"block_table": table[:1]},
        "scale": {"scale": 0.0},
        "vast scale": {"scale": 1e39},
        "soft_cap": {"soft_cap": -1.0},
        "vast soft_cap": {"soft_cap": 1e6},
        "gradient": {"q": q.clone().requires_grad_()},
        "window": {"window": 0},
    }[what]
    try:
        rt.flash_decode(**arguments)
    except UsageError as error:
        return error.message
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def prepare_without_a_cache(fabric: Any, variant: str, fields: dict[str, Any]) -> Any:
    from unittest import mock

    from taxfree_kernels.flash_decode.operation import OPERATION

    forbidden = dataclasses.replace(OPERATION, make_inputs=mock.Mock(side_effect=AssertionError))
    problem = problem_of(**fields)
    rt = runtime_of(fabric, problem, variant)
    with mock.patch("taxfree.runtime.operation", return_value=forbidden):
        rt.prepare([problem])
    return rt.choice(problem).variant


# -- tests -------------------------------------------------------------------------------------


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
def test_a_recorded_problem_runs_its_fused_winner(
    ranks: WorkerGroup, fields: dict[str, Any]
) -> None:
    assert run(ranks, "call_fused", fields=fields) == [(True, "persistent", [{"exact": 2}])] * WORLD


@pytest.mark.parametrize("fields", [{}, PAGED], ids=["dense", "paged"])
@pytest.mark.parametrize("variant", ["library", "gather", "fine_wait", "fused", "two_shot"])
def test_preparing_takes_no_memory_for_a_second_cache(
    ranks: WorkerGroup, variant: str, fields: dict[str, Any]
) -> None:
    found = run(ranks, "prepare_without_a_cache", variant=variant, fields=fields)
    assert found == [variant] * WORLD


@pytest.mark.parametrize("fields", [{}, PAGED], ids=["dense", "paged"])
@pytest.mark.parametrize("variant", ["gather", "fine_wait", "fused", "persistent", "two_shot"])
def test_what_is_prepared_is_what_a_call_launches(variant: str, fields: dict[str, Any]) -> None:
    from taxfree_kernels.flash_decode.operation import OPERATION, compile_inputs

    def make_inputs(problem: Any, rank: int, seed: int, device: torch.device) -> Any:
        return compile_inputs(problem, device)

    prepared = dataclasses.replace(OPERATION, make_inputs=make_inputs)
    problem = problem_of(**fields)
    calls = launched(problem, variant, OPERATION)
    assert calls
    assert launched(problem, variant, prepared) == calls


def test_the_scale_has_a_default(ranks: WorkerGroup) -> None:
    assert all(error < 0.01 for error in run(ranks, "call_with_defaults"))


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


def test_compiled_code_calls_it_as_often_as_it_is_written(ranks: WorkerGroup) -> None:
    assert run(ranks, "call_compiled") == [(True, [{"exact": 2}])] * WORLD


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "not float16 or bfloat16"),
        ("q", "q is not"),
        ("k", "4 dimensions"),
        ("v", "k is [2, 20, 1, 16], v [2, 19, 1, 16]"),
        ("heads", "heads of k have 16 values, of q 15"),
        ("strides", "not contiguous"),
        ("group", "q_heads=3 is not divisible by kv_heads=2"),
        ("batch", "k has 1 sequences, q 2"),
        ("lengths", "must be int32 [2, 2]"),
        ("long lengths", "kv_lens is torch.int64"),
        ("table", "block_table is torch.int32 [1, 4], must be int32 [2, 4]"),
        ("scale", "scale is 0.0"),
        ("vast scale", "scale is 1e+39"),
        ("soft_cap", "soft_cap is -1.0"),
        ("vast soft_cap", "at most 65536"),
        ("gradient", "an input requires a gradient"),
        ("window", "window is 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(ranks: WorkerGroup, what: str, message: str) -> None:
    for said in run(ranks, "call_badly", what=what):
        assert message in said
