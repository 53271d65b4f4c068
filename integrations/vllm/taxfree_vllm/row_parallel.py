"""vLLM's ``RowParallelLinear`` as one operation, with the fused add + RMSNorm behind it.

A layer is served if a record of its size serves some number of rows. Then its forward is one torch
op, which chooses by the number of rows at run time: taxfree, or vLLM's own matmul and all-reduce.
In code that vLLM compiles, a pass lets the op take a following ``fused_add_rms_norm`` along, if
records of that serve all numbers of rows that the code is compiled for. All other layers run vLLM's
own forward, with whatever vLLM fuses there.

A layer in fp8 is served if its class is one that keeps what checkpoints have, and if it still does
when it is called: vLLM may lay out weights and scales anew for the kernel that it picks.

The ops are no ordered effects, as taxfree's own are: vLLM could not cache compiled code then. All
ranks compile the same graph, so they make the same calls in the same order all the same.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from bisect import bisect
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from torch.fx import Graph
from torch.library import Library
from vllm import ir  # registers fused_add_rms_norm  # noqa: F401
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

import taxfree

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_E4M3 = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_BLOCK = 128
#: vLLM's methods whose layers have e4m3 and float32 scales of a tensor, of channels or of blocks
_FP8_METHODS = ("Fp8LinearMethod", "CompressedTensorsLinearMethod", "ModelOptFp8LinearMethod")
_LAID_OUT = "vLLM has laid out its weight for a kernel of its own"
_logger = init_logger("vllm.taxfree")


@RowParallelLinear.register_oot(name="RowParallelLinear")
class TaxfreeRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """vLLM's layer; its matmul and its all-reduce are one operation where that is served."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taxfree_name = _name(self.output_size_per_partition, self.input_size_per_partition)
        self._taxfree_layer_name = re.sub(r"\.\d+\.", ".*.", kwargs.get("prefix", ""))
        self._taxfree_unsupported_reason = _unsupported_reason(self)
        if self.tp_size > 1:
            why = self._taxfree_unsupported_reason
            ran = f"library: {why}" if why else "matmul_all_reduce"
            taxfree.count_calls(self._taxfree_name, ran, 0, None if why else _group().runtime)
        if self._taxfree_unsupported_reason is None:
            self._taxfree_group = get_tp_group().unique_name
            self._cpu_skip_gemm_dispatch = True  # vLLM on a CPU would replace the weight

    def forward(self, input_: torch.Tensor) -> Any:
        """The sum over the ranks, and the bias if vLLM adds it later."""
        why, factors = self._taxfree_unsupported_reason, None
        if why is None:
            factors = _factors(self)
            if isinstance(factors, str):
                why = f"{factors}: {self._taxfree_layer_name}"
            elif not isinstance(input_, torch.Tensor):
                why = "its input is quantised already"
        if why is not None or factors is None:
            if self.tp_size > 1:
                taxfree.count_calls(self._taxfree_name, f"library: {why}")
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        x = input_ if input_.dim() == 2 else input_.flatten(0, -2)
        y = torch.ops.taxfree_vllm.row_parallel(x, *factors, bias, self._taxfree_group)
        y = y if input_.dim() == 2 else y.view(*input_.shape[:-1], y.shape[1])
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


def _name(n: int, k: int) -> str:
    return f"RowParallelLinear({k}, {n})"


class _Factors(NamedTuple):
    """What a layer multiplies its input with.

    Args:
        weight: [n, k], k contiguous; of the input's dtype, or e4m3.
        weight_scale: of e4m3, float32: [1], [n, 1] or [ceil(n / 128), ceil(k / 128)], contiguous.
        input_scale: float32 [1], if the weight's scale is; the input's is static then.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None


def _factors(layer: Any) -> _Factors | str:
    """The factors of a layer as it is now, or the reason why they are not such."""
    if type(layer.quant_method) is UnquantizedLinearMethod:
        return _Factors(layer.weight)
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    weight, scale = layer.weight, getattr(layer, "weight_scale_inv", None)
    scale = getattr(layer, "weight_scale", None) if scale is None else scale
    static, blocks = getattr(layer, "input_scale", None), getattr(layer, "weight_block_size", None)
    if weight.dtype not in _E4M3 or scale is None or scale.dtype != torch.float32:
        return _LAID_OUT
    if weight.stride(1) != 1:
        weight = weight.t()
    if tuple(weight.shape) != (n, k) or weight.stride() != (k, 1):
        return _LAID_OUT
    if getattr(layer, "input_scale_ub", None) is not None:
        return "its inputs are bounded"
    if blocks is not None:
        groups = -(-n // _BLOCK), -(-k // _BLOCK)
        if list(blocks) != [_BLOCK] * 2 or static is not None or tuple(scale.shape) != groups:
            return f"scales of blocks of {list(blocks)}"
        return _Factors(weight, scale.contiguous())
    if static is not None:
        if scale.numel() != 1 or static.numel() != 1:
            return "a static scale of its input, and more than one of its weight"
        return _Factors(weight, scale.view(1), static.view(1))
    if scale.numel() != n:
        return "one scale of its weight, and none of its input"
    return _Factors(weight, scale.view(n, 1))


def _quantised_unsupported_reason(layer: Any) -> str | None:
    """Why a quantised layer, whose weight is not loaded yet, is not served; None if it may be."""
    kind, scheme = type(layer.quant_method).__name__, getattr(layer, "scheme", None)
    if kind not in _FP8_METHODS:
        return kind
    if scheme is not None and type(scheme).__name__ != "CompressedTensorsW8A8Fp8":
        return type(scheme).__name__
    if layer.weight.dtype not in _E4M3:
        return f"{kind}, of a weight that is {str(layer.weight.dtype).removeprefix('torch.')}"
    factors = _factors(layer)
    return f"{kind}, {factors}" if isinstance(factors, str) else None


def _unsupported_reason(layer: Any) -> str | None:
    """The reason why a layer runs vLLM's own forward, or None; collective."""
    if layer.tp_size == 1:
        return "one rank"
    if not layer.reduce_results:
        return "its sums are reduced elsewhere"
    if not layer.input_is_parallel:
        return "its input is not split"
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        why = _quantised_unsupported_reason(layer)
        if why is not None:
            return f"quantized, {why}: {layer._taxfree_layer_name}"
    if layer.params_dtype not in _DTYPES:
        return str(layer.params_dtype).removeprefix("torch.")
    if layer.bias is not None and layer.bias.dtype != layer.params_dtype:
        return "the bias has another dtype"
    config = get_current_vllm_config()
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT"
    if config.parallel_config.use_ubatching:
        return "two batches overlap"
    if config.parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism"
    return _group().layer_unsupported_reason(layer, config)


class _Group:
    """vLLM's tensor-parallel group: its runtime, and which sizes of layers that serves.

    Args:
        coordinator: vLLM's.
    """

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self.coordinator = coordinator
        self.runtime: taxfree.Runtime | None = None
        self.unsupported_reason = ""
        self.sizes: dict[Any, _Size] = {}
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()  # those in fp8
        try:
            self.runtime = taxfree.init(coordinator.device_group)
        except taxfree.FabricUnavailable as error:
            self.unsupported_reason = str(error)
            _logger.warning("taxfree serves nothing: %s", error)
            return
        # Workers may end without `atexit`. Peers end at their own time: nobody is waited for.
        Finalize(None, self.runtime.__exit__, (SystemExit, None, None), exitpriority=100)

    def layer_unsupported_reason(self, layer: Any, config: VllmConfig) -> str | None:
        """Prepare a layer's sizes; the reason if no number of rows is served; collective."""
        if self.runtime is None:
            return self.unsupported_reason
        max_rows = config.scheduler_config.max_num_batched_tokens
        bias, factors = layer.bias if not layer.skip_bias_add else None, _factors(layer)
        assert isinstance(factors, _Factors)
        if factors.weight_scale is not None:
            self._layers.add(layer)
        of_layer = layer.params_dtype, factors.weight, factors.weight_scale, bias
        if self._prepare(_key(*of_layer, has_norm=False), max_rows).max_rows == 0:
            return "no record"
        if config.compilation_config.mode == CompilationMode.VLLM_COMPILE:
            self._prepare(_key(*of_layer, has_norm=True), max_rows)
            _install_pass(config)
        return None

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weight.t() (+ bias) as vLLM multiplies it."""
        if weight.dtype == x.dtype:
            return torch.nn.functional.linear(x, weight, bias)
        for layer in self._layers:  # the op has tensors alone: names would be in cached code
            if layer.weight.data_ptr() == weight.data_ptr():
                multiplied: torch.Tensor = layer.quant_method.apply(layer, x, bias)
                return multiplied
        raise RuntimeError("no layer of this group has this weight")

    def _prepare(self, key: Any, max_rows: int) -> _Size:
        if key not in self.sizes:
            assert self.runtime is not None
            n, k, dtype, scales, has_bias, has_norm = key
            fp8 = {} if scales == "none" else {"x_dtype": "fp8", "scales": scales}
            problem = taxfree.MatmulAllReduce(
                m=1, n=n, k=k, dtype=_DTYPES[dtype], world_size=self.runtime.world_size,
                bias=has_bias, residual=has_norm, rms_norm=has_norm, **fp8,
            )  # fmt: skip
            size = self.sizes[key] = _Size(self.runtime, problem, max_rows)
            _logger.info("taxfree serves up to %d rows of %s", size.max_rows, problem)
        return self.sizes[key]

    def choices(self) -> list[str]:
        """The table's choices for the layers so far, as text."""
        return sorted(f"{key} {size.choices}" for key, size in self.sizes.items())


class _Size:
    """Row-parallel layers of one size.

    Args:
        runtime: which serves them.
        problem: theirs, of one row.
        max_rows: that vLLM may ask for.

    Attributes:
        max_rows: that are served; 0 if none are.
        choices: rows -> the table's choice, as text.
    """

    def __init__(
        self, runtime: taxfree.Runtime, problem: taxfree.MatmulAllReduce, max_rows: int
    ) -> None:
        self._runtime, self._problem = runtime, problem
        self._found: dict[tuple[int, str], bool] = {}
        if runtime.tunes_problems:  # what has no record is tuned before it is prepared
            runtime.prepare([problem.for_rows(1, max_rows)])
        tried = _tried(1, max_rows)
        self.choices = {rows: str(runtime.choice(self._of(rows))) for rows in tried}
        self._collects = runtime.collects_problems
        self.max_rows = max_rows if self._collects else self._largest(tried)
        if self.max_rows:
            runtime.prepare([problem.for_rows(1, self.max_rows)])
        self._found.clear()  # a plan may have failed

    def _largest(self, tried: Sequence[int]) -> int:
        """The most rows that a record serves: it serves a power of two, and all to some number."""
        largest = max(filter(self._has_record, tried), default=0)
        beyond = range(largest + 1, min(2 * largest, tried[-1] + 1))
        return largest + bisect(beyond, False, key=lambda rows: not self._has_record(rows))

    def _has_record(self, rows: int) -> bool:
        return any(self._is_ours(rows, mode) for mode in ("graph", "eager"))

    def serves_all(self, least: int, most: int) -> bool:
        """Whether a record serves all numbers of rows in a range, or problems are collected."""
        return self._collects or (
            0 < least <= most <= self.max_rows and all(map(self._has_record, _tried(least, most)))
        )

    def serves(self, rows: int) -> bool:
        """Whether taxfree runs a call of this moment; with ``TAXFREE_LOG`` it always does."""
        if not 0 < rows <= self.max_rows:
            return False
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return self._collects or self._is_ours(rows, "graph" if is_captured else "eager")

    def _is_ours(self, rows: int, mode: str) -> bool:
        found = self._found.get((rows, mode))
        if found is None:
            choice = self._runtime.choice(self._of(rows)).of(mode)
            # without a record vLLM's own all-reduce runs, whatever the library's fastest path is
            found = choice.kind != "baseline" and choice.variant != "baseline"
            self._found[rows, mode] = found
        return found

    def _of(self, rows: int) -> taxfree.MatmulAllReduce:
        return dataclasses.replace(self._problem, m=rows)


def _tried(least: int, most: int) -> list[int]:
    """Both ends of a range and the powers of two between: a record that serves one serves less."""
    powers = (1 << bits for bits in range(most.bit_length()))
    return sorted({least, *(power for power in powers if power >= least), most})


_groups: dict[str, _Group] = {}


def _group() -> _Group:
    """The tensor-parallel group, opened if it is not; collective."""
    coordinator = get_tp_group()
    if coordinator.unique_name not in _groups:
        _groups[coordinator.unique_name] = _Group(coordinator)
    return _groups[coordinator.unique_name]


def _key(
    dtype: torch.dtype,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    has_norm: bool,
) -> Any:
    return (*weight.shape, dtype, _scales(weight, weight_scale), bias is not None, has_norm)


def _scales(weight: torch.Tensor, weight_scale: torch.Tensor | None) -> str:
    """Who has a scale, as taxfree names it; "none" of a weight in 16 bits."""
    if weight_scale is None:
        return "none"
    if weight_scale.dim() == 1:
        return "tensor"
    return "channel" if tuple(weight_scale.shape) == (weight.shape[0], 1) else "block"


# -- torch ops --

_library = Library("taxfree_vllm", "DEF")
_ARGUMENTS = "Tensor x, Tensor weight, Tensor? weight_scale, Tensor? input_scale, Tensor? bias"
_NORM = "Tensor residual, Tensor norm_weight, float eps"


def _row_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    """The sum of x @ weight.t() over the ranks, and the bias; [m, n] of x [m, k]."""
    group = _groups[group_name]
    size = group.sizes.get(_key(x.dtype, weight, weight_scale, bias, has_norm=False))
    if size is None or not size.serves(x.shape[0]):
        taxfree.count_calls(_name(*weight.shape), "library: no record of so many rows")
        own = bias if group.coordinator.rank_in_group == 0 else None
        summed: torch.Tensor = group.coordinator.all_reduce(group.product(x, weight, own))
        return summed
    taxfree.count_calls(_name(*weight.shape), "matmul_all_reduce")
    assert group.runtime is not None
    if weight_scale is None:
        return group.runtime.matmul_all_reduce(x, weight.t(), bias)
    factors = _in_fp8(x, weight, weight_scale, input_scale)
    return group.runtime.scaled_matmul_all_reduce(*factors, bias, dtype=x.dtype)


def _in_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both factors of taxfree's scaled calls, and their scales."""
    values, scale = taxfree.quantise(x, _scales(weight, weight_scale), input_scale)
    return values, weight.t(), scale, weight_scale.t()  # of one dimension it stays as it is


def _row_parallel_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group_name: str,
) -> torch.Tensor:
    """The sum with a residual, normalised, and as it is: [2, m, n] for vLLM's fused add + RMSNorm.

    One tensor, since outputs of a torch op must not share memory, as taxfree's do.
    """
    taxfree.count_calls(_name(*weight.shape), "matmul_all_reduce_rms_norm")
    runtime = _groups[group_name].runtime
    assert runtime is not None
    out = x.new_empty(2, x.shape[0], weight.shape[0])
    added = norm_weight, bias, residual, eps
    if weight_scale is None:
        runtime.matmul_all_reduce_rms_norm(x, weight.t(), *added, out=out)
    else:
        factors = _in_fp8(x, weight, weight_scale, input_scale)
        runtime.scaled_matmul_all_reduce_rms_norm(*factors, *added, dtype=x.dtype, out=out)
    return out


def _register(name: str, arguments: str, function: Any, *leading: int) -> None:
    def fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        return x.new_empty(*leading, x.shape[0], weight.shape[0])

    _library.define(f"{name}({arguments}, str group_name) -> Tensor")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"taxfree_vllm::{name}", fake, lib=_library)


_register("row_parallel", _ARGUMENTS, _row_parallel)
_register("row_parallel_rms_norm", f"{_ARGUMENTS}, {_NORM}", _row_parallel_rms_norm, 2)


# -- compiled code --


class _RmsNormPass(InductorPass):  # type: ignore[misc]
    """Rewrites a row-parallel matmul and the fused add + RMSNorm behind it into one op."""

    _rows = 0, 0  # least and most of the code that is compiled now; not known yet

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """What vLLM asks first: it tells the numbers of rows."""
        self._rows = compile_range.start, compile_range.end
        return True

    def __call__(self, graph: Graph) -> None:
        for norm in graph.find_nodes(
            op="call_function", target=torch.ops.vllm_ir.fused_add_rms_norm.default
        ):
            y, residual, norm_weight, eps, *others = norm.args
            if any(each is not None for each in others) or norm_weight is None:
                continue  # of a part of the columns, or without a weight
            if y.target is not torch.ops.taxfree_vllm.row_parallel.default or len(y.users) != 1:
                continue
            if norm_weight.meta["val"].dtype != y.meta["val"].dtype:
                continue
            *factors, group_name = y.args
            _, weight, scale, _, bias = (each and each.meta["val"] for each in factors)
            key = _key(y.meta["val"].dtype, weight, scale, bias, has_norm=True)
            size = _groups[group_name].sizes.get(key)
            if size is None or not size.serves_all(*self._rows):
                continue
            with graph.inserting_before(norm):
                both = graph.call_function(
                    torch.ops.taxfree_vllm.row_parallel_rms_norm.default,
                    (*factors, residual, norm_weight, eps, group_name),
                )
                both.meta["val"] = y.meta["val"].new_empty(2, *y.meta["val"].shape)
                for part in list(norm.users):  # each takes one of the two
                    place = 0, part.args[1]
                    taken = graph.call_function(torch.ops.aten.select.int, (both, *place))
                    taken.meta["val"] = both.meta["val"].select(*place)
                    part.replace_all_uses_with(taken)
                    graph.erase_node(part)
            for replaced in (norm, y):
                graph.erase_node(replaced)

    def uuid(self) -> str:
        """vLLM's cache key of compiled code: the version, this file, the table."""
        choices = {name: group.choices() for name, group in _groups.items()}
        source = Path(__file__).read_text(encoding="utf-8")
        known: str = self.hash_dict({"choices": choices, "source": source})
        return f"taxfree {taxfree.__version__} {known}"


def _install_pass(config: VllmConfig) -> None:
    """Let vLLM run the pass after its own; its cache key takes the pass's along."""
    passes = config.compilation_config.inductor_compile_config
    installed = passes.setdefault(current_platform.pass_key, _RmsNormPass())
    if not isinstance(installed, _RmsNormPass):
        _logger.warning_once(
            "taxfree fuses no RMSNorm: vLLM has another custom pass, %s", installed
        )
