"""Calls that are refused, as ranks of the host fabric make them.

Each function makes one such call on a fabric, and lets its error pass.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import taxfree
from taxfree._runtime.runtime import Runtime
from taxfree.settings import Settings
from taxfree_cli.exits import failure
from taxfree_kernels.fabric.open import open_fabric
from taxfree_kernels.variant import operation
from taxfree_tuning_db import Database

M, N, K = 5, 32, 32
OP = "all_gather_matmul"
PATIENCE_S = 1.5


def refused(fabric: Any, call: str, folder: Path) -> dict[str, Any] | None:
    """The error of this rank in a call of a function of this module; None without an error."""
    try:
        globals()[call](fabric, folder)
    except Exception as error:
        return asdict(failure(error))
    return None


def problem_of(**changes: Any) -> taxfree.AllGatherMatmul:
    return taxfree.AllGatherMatmul(**{"m": M, "n": N, "k": K, "world_size": 2, **changes})


def tensors(fabric: Any, **changes: Any) -> Any:
    """a_shard, weight and bias of a problem that both ranks can call."""
    problem = problem_of(bias=True, **changes)
    return operation(OP).make_inputs(problem, fabric.rank, 1, fabric.device)


def call(fabric: Any, change: Callable[..., Any], **options: Any) -> None:
    """Call with tensors of which something is changed."""
    runtime = Runtime.on_fabric(fabric, ())
    runtime.all_gather_matmul(*change(*tensors(fabric)), gather_dim=1, **options)


# -- tensors --


def of_float32(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a.float(), weight.float(), bias.float()))


def of_two_dtypes(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a, weight.bfloat16(), bias))


def of_a_bias_of_another_dtype(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a, weight, bias.float()))


def on_another_device(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a, weight.to("meta"), bias))


def on_another_device_later(fabric: Any, _: Path) -> None:
    a, weight, bias = tensors(fabric)
    runtime = Runtime.on_fabric(fabric, ())
    runtime.all_gather_matmul(a, weight, bias, gather_dim=1)
    runtime.all_gather_matmul(a, weight.to("meta"), bias, gather_dim=1)


def vectors(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a[0], weight, bias))


def of_other_columns(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a[:, 1:], weight, bias))


def with_strides_over_one(fabric: Any, _: Path) -> None:
    wide = torch.empty(2 * K, 2 * N, dtype=torch.float16)
    call(fabric, lambda a, weight, bias: (a, wide[::2, ::2], bias))


def with_a_long_bias(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a, weight, bias.repeat(2)))


def with_a_strided_bias(fabric: Any, _: Path) -> None:
    call(fabric, lambda a, weight, bias: (a, weight, bias.repeat(2)[::2]))


def with_other_rows(fabric: Any, _: Path) -> None:
    call(fabric, lambda *tensors: tensors, m=M + 1)


def with_a_third_dimension(fabric: Any, _: Path) -> None:
    Runtime.on_fabric(fabric, ()).all_gather_matmul(*tensors(fabric), gather_dim=2)


def into_a_small_output(fabric: Any, _: Path) -> None:
    call(fabric, lambda *tensors: tensors, out=torch.empty(M - 1, N, dtype=torch.float16))


def into_a_transposed_output(fabric: Any, _: Path) -> None:
    call(fabric, lambda *tensors: tensors, out=torch.empty(N, M, dtype=torch.float16).t())


def into_an_output_of_float32(fabric: Any, _: Path) -> None:
    call(fabric, lambda *tensors: tensors, out=torch.empty(M, N))


def into_a_small_output_later(fabric: Any, _: Path) -> None:
    inputs, runtime = tensors(fabric), Runtime.on_fabric(fabric, ())
    runtime.all_gather_matmul(*inputs, gather_dim=1)
    small = torch.empty(M - 1, N, dtype=torch.float16)
    runtime.all_gather_matmul(*inputs, gather_dim=1, out=small)


def call_normalised(fabric: Any, change: Callable[..., Any], **options: Any) -> None:
    """Call with tensors, x, weight and norm_weight, of which something is changed."""
    dtype = torch.float16
    x, weight, norm_weight = (torch.ones(size, dtype=dtype) for size in ((M, K), (K, N), (N,)))
    runtime = Runtime.on_fabric(fabric, ())
    runtime.matmul_all_reduce_rms_norm(*change(x, weight, norm_weight), **options)


def with_a_short_norm_weight(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda x, weight, norm_weight: (x, weight, norm_weight[1:]))


def of_a_norm_weight_of_float32(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda x, weight, norm_weight: (x, weight, norm_weight.float()))


def with_a_norm_weight_on_another_device(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda x, weight, norm_weight: (x, weight, norm_weight.to("meta")))


def normalised_without_eps(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda *tensors: tensors, eps=0.0)


def normalised_by_a_small_eps(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda *tensors: tensors, eps=1e-50)


def normalised_by_no_number(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda *tensors: tensors, eps=float("nan"))


def normalised_into_one_output(fabric: Any, _: Path) -> None:
    call_normalised(fabric, lambda *tensors: tensors, out=torch.empty(M, N, dtype=torch.float16))


def with_uneven_heads(fabric: Any, _: Path) -> None:
    q, cache = torch.ones(1, 3, 16).half(), torch.ones(1, 4, 2, 16).half()
    lengths = torch.ones(fabric.world_size, 1, dtype=torch.int32)
    Runtime.on_fabric(fabric, ()).flash_decode(q, cache, cache, lengths)


def call_stencil(fabric: Any, u: torch.Tensor, steps: int = 1, **options: Any) -> None:
    Runtime.on_fabric(fabric, ()).stencil(u, steps, **options)


def of_a_domain_of_float64(fabric: Any, _: Path) -> None:
    call_stencil(fabric, torch.ones(4, 6).double())


def of_a_domain_that_ranks_cannot_share(fabric: Any, _: Path) -> None:
    call_stencil(fabric, torch.ones(4, 6), across=3)


def of_no_steps(fabric: Any, _: Path) -> None:
    call_stencil(fabric, torch.ones(4, 6), 0)


def into_an_output_without_norms(fabric: Any, _: Path) -> None:
    call_stencil(fabric, torch.ones(4, 6), norm_every=1, out=torch.empty(4, 6))


def call_embedding(fabric: Any, change: Callable[..., Any], **options: Any) -> None:
    """Call with tensors of whole tables, weights included, of which something is changed."""
    problem = taxfree.EmbeddingAllToAll(2, 3, 2, 5, 4, weighted=True, world_size=2)
    made = operation("embedding_all_to_all").make_inputs(problem, fabric.rank, 1, fabric.device)
    Runtime.on_fabric(fabric, ()).embedding_all_to_all(*change(*made), **options)


def of_tables_of_float64(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda weight, *bags: (weight.double(), *bags))


def of_tables_of_all_ranks(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda weight, *bags: (weight.repeat(2, 1, 1), *bags))


def of_rows_of_odd_length(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda weight, *bags: (weight[:, :, :3].contiguous(), *bags))


def of_tables_between_16_bytes(fabric: Any, _: Path) -> None:
    def moved(weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.new_zeros(4), weight.flatten()])[4:].view(weight.shape)

    call_embedding(fabric, lambda weight, *bags: (moved(weight), *bags))


def with_indices_of_int64(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda weight, indices, *others: (weight, indices.long(), *others))


def with_room_that_bags_do_not_share(fabric: Any, _: Path) -> None:
    call_embedding(
        fabric,
        lambda weight, indices, offsets, weights: (weight, indices[:, 1:], offsets, weights[:, 1:]),
    )


def with_weights_of_a_mean(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda *tensors: tensors, mode="mean")


def with_another_pooling(fabric: Any, _: Path) -> None:
    call_embedding(fabric, lambda *tensors: tensors, mode="max")


def with_gradients_of_weights(fabric: Any, _: Path) -> None:
    problem = taxfree.EmbeddingAllToAll(2, 3, 2, 5, 4, weighted=True, world_size=2)
    made = operation("embedding_all_to_all").make_inputs(problem, fabric.rank, 1, fabric.device)
    *tensors, weights = made
    importlib.import_module("taxfree._runtime.ops")  # registers the torch ops
    runtime = Runtime.on_fabric(fabric, ())
    runtime.embedding_all_to_all(*tensors, weights.requires_grad_()).sum().backward()


# -- ranks that differ --


def with_different_sizes(fabric: Any, _: Path) -> None:
    inputs = tensors(fabric, m=M + fabric.rank)
    Runtime.on_fabric(fabric, ()).all_gather_matmul(*inputs, gather_dim=1)


def with_different_dtypes(fabric: Any, _: Path) -> None:
    inputs = tensors(fabric, dtype=("float16", "bfloat16")[fabric.rank])
    Runtime.on_fabric(fabric, ()).all_gather_matmul(*inputs, gather_dim=1)


def with_wrong_tensors_on_one_rank(fabric: Any, _: Path) -> None:
    impatient = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    own = open_fabric("host", impatient, 1 << 20)
    a, weight, bias = tensors(fabric)
    if fabric.rank == 1:
        weight = weight.bfloat16()
    Runtime.on_fabric(own, ()).all_gather_matmul(a, weight, bias, gather_dim=1)


def on_one_rank_alone(fabric: Any, _: Path) -> None:
    own = open_fabric("host", fabric.group, 1 << 20, PATIENCE_S)
    inputs, problem = tensors(fabric), problem_of(bias=True)
    from tests.taxfree.test_runtime import record_of

    runtime = Runtime.on_fabric(own, [record_of(own, problem)])
    runtime.prepare([problem])
    if fabric.rank == 0:
        runtime.all_gather_matmul(*inputs, gather_dim=1)
        runtime.check()


# -- planning --


def prepare_for_other_ranks(fabric: Any, _: Path) -> None:
    Runtime.on_fabric(fabric, ()).prepare([problem_of(world_size=4)])


def prepare_no_problem(fabric: Any, _: Path) -> None:
    Runtime.on_fabric(fabric, ()).prepare([{"m": M, "n": N, "k": K}])


def a_problem_that_does_not_split(_: Any, __: Path) -> None:
    problem_of(k=K + 1)


def strictly_without_a_record(fabric: Any, _: Path) -> None:
    runtime = Runtime.on_fabric(fabric, (), Settings(strict=True))
    runtime.all_gather_matmul(*tensors(fabric), gather_dim=1)


# -- init --


def init_on_no_memory(_: Any, __: Path) -> None:
    taxfree.init(heap_bytes=0)


def init_on_a_small_heap(_: Any, __: Path) -> None:
    taxfree.init(heap_bytes=1000)


def init_without_time(_: Any, __: Path) -> None:
    taxfree.init(timeout_s=-1.0)


def init_with_a_flag_for_a_time(_: Any, __: Path) -> None:
    taxfree.init(timeout_s=True)


def init_with_a_wrong_variable_on_one_rank(fabric: Any, _: Path) -> None:
    with _variable("TAXFREE_TIMEOUT", "soon" if fabric.rank == 1 else "30"):
        taxfree.init(db="none.sqlite")


def init_from_text(_: Any, folder: Path) -> None:
    path = folder / "text.sqlite"
    path.write_text("no database at all\n" * 100)
    taxfree.init(db=path)


def init_from_a_newer_database(fabric: Any, folder: Path) -> None:
    path = folder / "newer.sqlite"
    if fabric.rank == 0:
        Database(path).close()
        with contextlib.closing(sqlite3.connect(path)) as sqlite, sqlite:
            sqlite.execute("UPDATE meta SET value = '2'")
    taxfree.init(db=path)


def use_a_group_without_a_runtime(_: Any, __: Path) -> None:
    importlib.import_module("taxfree._runtime.ops")  # registers the torch ops

    a = torch.ones(2, 2)
    torch.ops.taxfree.all_gather_matmul(a, a, None, 1, None, "nobodys")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
