"""Shared by all variants: a rank's attention, the merges, the exchange of parts, and plans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device.peers import Group
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import exchange, spaces
from taxfree_kernels.flash_decode.attend import Heads, Inputs, Parts, Splits, attend, store_rows
from taxfree_kernels.flash_decode.by_warp import REGISTERS, Steps, attend_by_warp
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.flash_decode.spaces import words_of_part
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, pdl_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized

Size = tuple[int, int]  # sequences, and a rank's capacity in keys of each

_SEND_BLOCK = 2048  # float32 values that a sending program copies at a time
_MERGED_ELEMENTS = 4096  # float32 values of parts that a program of 4 warps loads at a time


@triton.jit(do_not_specialize=["batch", "capacity", "rank"])
def _attend(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr, stride_k, stride_v, batch, capacity,
    parts, rank, GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    gdc_launch_dependents(GROUP)
    inputs = Inputs(q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr, stride_k, stride_v)
    attend(tl.program_id(0), inputs, batch, capacity, parts, rank, GROUP, HEADS, SPLIT)


@triton.jit(do_not_specialize=["rows"])
def _merge_splits(
    parts, target_ptr, rows, GROUP: tl.constexpr, MERGE: tl.constexpr, INTO_OUTPUT: tl.constexpr,
    CHAINED: tl.constexpr, NEXT_FIRST: tl.constexpr,
):  # fmt: skip
    if NEXT_FIRST:
        gdc_launch_dependents(GROUP)
    gdc_wait(GROUP)
    if CHAINED:
        gdc_launch_dependents(GROUP)
    row = tl.program_id(0) * MERGE.ROWS + tl.arange(0, MERGE.ROWS)
    row_mask = row < rows
    out, lse = exchange.merge_splits(row, row_mask, parts, MERGE)
    if INTO_OUTPUT:
        exchange.store_output(target_ptr, out, row, row_mask, MERGE.V_DIM)
    else:
        store_rows(target_ptr, out, lse, row, row_mask, rows, MERGE.V_DIM)


@triton.jit(do_not_specialize=["rows"])
def _merge_ranks(
    parts_ptr, part_elements, out_ptr, rows, GROUP: tl.constexpr, SOURCES_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr, OUT_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * OUT_ROWS + tl.arange(0, OUT_ROWS)
    row_mask = row < rows
    out, _ = exchange.merge_ranks(
        row, row_mask, parts_ptr, part_elements, rows, GROUP, SOURCES_BLOCK, V_DIM
    )
    exchange.store_output(out_ptr, out, row, row_mask, V_DIM)


class LocalAttention:
    """One rank's attention to its own keys, as a separate kernel or within another.

    Args:
        others: sizes of the plan's further scratch buffers, in float32 elements; see `scratch`.

    Attributes:
        constants, options: those of the splits' kernel.
        scratch: the parts of splits, their runs, and the buffers of `others`.
    """

    def __init__(
        self, problem: FlashDecode, fabric: Fabric, config: Config, others: tuple[int, ...] = ()
    ) -> None:
        self._problem, self._rank, self._splits = problem, fabric.rank, config["SPLITS"]
        self._head_blocks = problem.kv_heads * -(-problem.group_size // config["BLOCK_H"])
        slots = problem.batch * config["SPLITS"]
        self._split_elements = -(-problem.q_heads * (problem.v_head_dim + 1) // 64) * 64
        self.scratch = fabric.workspace.scratch(
            ((slots * self._split_elements,), torch.float32),
            ((2 * problem.rows,), torch.int32),
            *(((size,), torch.float32) for size in others),
        )
        self.constants = {
            "GROUP": Group(problem.world_size, fabric.backend),
            "HEADS": Heads(
                problem.q_heads,
                problem.kv_heads,
                problem.head_dim,
                problem.v_head_dim,
                problem.page_size,
                problem.soft_cap,
                problem.window,
                problem.kv_scales,
            ),
            "SPLIT": Splits(
                power_of_2(problem.batch, 1),
                config["SPLITS"],
                config["BLOCK_H"],
                config["BLOCK_N"],
                config.get("XCDS", 1),
            ),
        }
        self.options = compile_options(fabric.backend, config)
        # Filled in place: planning under graph capture must not copy from the host.
        scale = problem.head_dim**-0.5
        self._scaling = torch.full((2,), scale, dtype=torch.float32, device=fabric.device)
        options = self.options | pdl_options({"launch_pdl": is_chained(config)})
        self._kernel = self._for_any_cache = Kernel(_attend, 0, self.constants, options)
        if config.get("BY_WARP"):
            early = loads_early(fabric, config)
            steps = Steps(config["num_warps"], config["num_stages"] - 1, early)
            constants = self.constants | {"STEP": steps}
            by_warp = {"num_stages": 1, "maxnreg": REGISTERS}  # Triton has nothing to pipeline
            self._kernel = Kernel(attend_by_warp, 0, constants, options | by_warp)

    @property
    def parts(self) -> Parts:
        """The buffer for the splits' parts."""
        parts, runs, *_ = self.scratch()
        return Parts(parts, self._split_elements, runs)

    def programs(self, batch: int) -> int:
        """The number of programs of the splits."""
        return int(batch * self._splits * self._head_blocks)

    def last_args(self, size: Size) -> tuple[Any, ...]:
        """A kernel's arguments for ``attend``, after those of :meth:`args`."""
        return (*size, self.parts, self._rank)

    def kernel(self, size: Size) -> Kernel:
        """The kernel of the splits, for sequences and keys of each."""
        return self._kernel.resized(self.programs(size[0]), self.last_args(size))

    def args(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The fields of :class:`Inputs`, flat: a tuple per call would take more host time.

        Args:
            inputs: as the operation's ``make_inputs`` says.
        """
        q, k, v, kv_lens, table, scaling, *scales = inputs
        scaling = self._scaling if scaling is None else scaling
        return (
            q, k, v, kv_lens, kv_lens if table is None else table,
            (scaling, *scales) if scales else scaling, k.stride()[:3], v.stride()[:3],
        )  # fmt: skip

    def launch(self, kernel: Kernel, inputs: Sequence[Any]) -> None:
        """Write the splits' parts; takes the result of :meth:`kernel`.

        The kernel by warp loads 16 bytes at a time. Problems have no strides, so only a call shows
        whether rows of its cache start at multiples of that; if not, the other kernel runs.
        """
        _, k, v, *_ = inputs
        if self._kernel is not self._for_any_cache and not (_is_aligned(k) and _is_aligned(v)):
            kernel = self._for_any_cache.resized(kernel.grid, kernel.last_args)
        kernel(*self.args(inputs))

    def merging(self, rows: int) -> exchange.Merge:
        """The constants to merge splits, `rows` rows at a time."""
        problem = self._problem
        return exchange.Merge(
            problem.q_heads,
            self._splits if problem.batch == 1 else 0,
            _parts_at_a_time(problem, self._splits, rows),
            problem.v_head_dim,
            rows,
        )


def _is_aligned(cache: torch.Tensor) -> bool:
    """Whether compilers see that rows of a head start at multiples of 16 bytes.

    Of strides they know only whether 16 divides the number of elements.
    """
    return cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in cache.stride()[:3])


def _parts_at_a_time(problem: FlashDecode, parts: int, rows: int) -> int:
    most = _MERGED_ELEMENTS // (rows * power_of_2(problem.v_head_dim, 16))
    return max(1, min(power_of_2(parts, 1), most))


class SplitsMerge:
    """A kernel that merges a rank's splits into one part, or into the output.

    Args:
        rows: number of rows per program.
        finishes: the config of a call that ends with this kernel, which merges into the output.
    """

    def __init__(
        self,
        problem: FlashDecode,
        fabric: Fabric,
        attention: LocalAttention,
        rows: int,
        finishes: Config | None = None,
    ) -> None:
        self._attention, self._q_heads, self._rows = attention, problem.q_heads, rows
        self._kernel = Kernel(
            _merge_splits,
            grid=0,
            constants={
                "GROUP": attention.constants["GROUP"],
                "MERGE": attention.merging(rows),
                "INTO_OUTPUT": finishes is not None,
                "CHAINED": is_chained(finishes or {}),
                # Splits can only load early if they begin before the merge has ended.
                "NEXT_FIRST": loads_early(fabric, finishes or {}),
            },
            options=finishing_options(fabric, finishes or {}),
        )

    def kernel(self, batch: int) -> Kernel:
        """The kernel for a number of sequences."""
        return self._kernel.resized(-(-batch * self._q_heads // self._rows), ())

    def launch(self, kernel: Kernel, target: torch.Tensor, batch: int) -> None:
        """Merge into the target; takes the result of :meth:`kernel`."""
        kernel(self._attention.parts, target, batch * self._q_heads)


class RanksMerge:
    """A kernel that merges the parts of all ranks into the output, `rows` rows per program."""

    def __init__(self, problem: FlashDecode, fabric: Fabric, rows: int) -> None:
        self._problem, self._rows = problem, rows
        self._kernel = Kernel(
            _merge_ranks,
            grid=0,
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "SOURCES_BLOCK": _parts_at_a_time(problem, problem.world_size, rows),
                "V_DIM": problem.v_head_dim,
                "OUT_ROWS": rows,
            },
            options=compile_options(fabric.backend, {}),
        )

    def kernel(self, batch: int) -> Kernel:
        """The kernel for a number of sequences."""
        return self._kernel.resized(-(-batch * self._problem.q_heads // self._rows), ())

    def launch(self, kernel: Kernel, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Merge; takes the result of :meth:`kernel`."""
        problem = resized(self._problem, batch=len(out))
        kernel(parts, problem.part_elements, out, problem.rows)


def loads_early(fabric: Fabric, config: Config) -> bool:
    """Whether the splits load their first keys before the preceding kernel has ended."""
    return fabric.static_cache and is_chained(config) and bool(config.get("BY_WARP"))


def is_chained(config: Config) -> bool:
    """Whether the splits, too, are launched early, and the call's last kernel lets the next begin.

    A kernel does so only after its own wait, so at most two kernels run at a time, and the second
    kernel of a call begins after the previous call has ended.
    """
    return bool(config.get("CHAINED"))


def finishing_options(fabric: Fabric, config: Config) -> dict[str, Any]:
    """Options of the kernel after the splits."""
    warps = {"num_warps": config["MERGE_WARPS"]} if "MERGE_WARPS" in config else {}
    return compile_options(fabric.backend, warps) | pdl_options(config)


class DecodePlan(Plan):
    """A plan whose calls begin with a kernel for the splits.

    Args:
        others: see :class:`LocalAttention`.

    Attributes:
        attention: the kernel of the splits.
    """

    def __init__(
        self, problem: FlashDecode, fabric: Fabric, config: Config, others: tuple[int, ...] = ()
    ) -> None:
        self._problem = problem
        self.attention = LocalAttention(problem, fabric, config, others)
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, size: Size) -> tuple[Kernel, ...]:
        problem = resized(self._problem, batch=size[0], kv_len_per_rank=size[1])
        return (self.attention.kernel(size), *self.finishing(problem))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return self._sized[size, self._problem.kv_len_per_rank]

    def run(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        *inputs, out = tensors
        assert out is not None
        attend, *finishing = self._sized[size_of(inputs)]
        self.attention.launch(attend, inputs)
        self.finish(out, *finishing)
        return out

    @abstractmethod
    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        """The kernels after the splits, for a problem of some size."""

    @abstractmethod
    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        """Launch them."""


def size_of(inputs: Sequence[Any]) -> Size:
    """The number of sequences of a call, and a rank's capacity in keys of each."""
    q, k, _, _, table, *_ = inputs
    return q.shape[0], k.shape[1] if table is None else k.shape[1] * table.shape[1]


class PartsExchange:
    """Arguments, besides tensors, of kernels that push parts to inboxes and combine them.

    Args:
        chunk_rows: rows that share a signal.

    Attributes:
        chunks: number of chunks, each with a channel unless words are sent. Smaller problems have
            the same number, some of them empty.
        constants: GROUP and EXCHANGE.
        sending_constants: those of a kernel that sends chunks of a part.
    """

    def __init__(
        self, problem: FlashDecode, fabric: Fabric, config: Config, chunk_rows: int
    ) -> None:
        self._packed = config["PACKED"] if config.get("LL") else None
        if self._packed is None:
            self._inbox = fabric.pool.slots(problem.slot_bytes // 4, torch.float32)
        else:
            slots = fabric.pool.lamport_slots if self._packed else fabric.pool.ll_slots
            self._inbox = slots(problem.world_size * words_of_part(problem, self._packed))
        self._ranks = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._out_rows = config["OUT_ROWS"]
        self.chunks = -(-problem.rows // chunk_rows)
        xcds = config.get("XCD_SIGNALS", 0)
        self._counters = fabric.workspace.counters(xcds) if xcds else lambda: None
        group = Group(problem.world_size, fabric.backend)
        self.constants = {
            "GROUP": group,
            "EXCHANGE": exchange.Exchange(
                chunk_rows,
                self._packed is not None,
                bool(self._packed),
                _parts_at_a_time(problem, problem.world_size, self._out_rows),
                problem.v_head_dim,
                self._out_rows,
                xcds,
            ),
        }
        self.sending_constants = {
            "GROUP": group,
            "CHUNK_ROWS": chunk_rows,
            "V_DIM": problem.v_head_dim,
            "SEND_BLOCK": _SEND_BLOCK,
        }

    def combiners(self, problem: FlashDecode) -> int:
        """The number of programs that combine all rows of a problem of some size."""
        return -(-problem.rows // self._out_rows)

    def args(self, problem: FlashDecode) -> tuple[Any, ...]:
        """Arguments of such a kernel, for a problem of some size.

        Returns:
            inbox (of words if the config says so), rows, control, heap_bases, rank.
        """
        part_elements = problem.part_elements
        if self._packed is not None:
            part_elements = words_of_part(problem, self._packed)
        inbox = exchange.Inbox(*self._inbox, part_elements, self._counters())
        return (inbox, problem.rows, *self._ranks)


class DecodeVariant(Variant):
    """A variant with the meta-parameters of the splits and of the merges."""

    illegal_reason = staticmethod(spaces.illegal_reason)

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        return {**spaces.split_space(problem, hardware), **spaces.merge_space(problem, hardware)}

    def seed_configs(self, problem: FlashDecode, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.seed_configs(problem, hardware, self.space(problem, hardware))


class ExchangingVariant(DecodeVariant):
    """A variant whose kernels push parts: adds meta-parameters, and needs peers."""

    def unsupported_reason(self, problem: FlashDecode, hardware: Hardware) -> str | None:
        return "one rank has no peers" if problem.world_size == 1 else None

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), **spaces.push_space(problem, hardware)}
