"""What the variants share on the host: a rank's attention, merges, and what kernels exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.attend import attend
from taxfree_kernels.flash_decode.merge import merge_into_output, merge_into_part
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Space, Variant

_SEND_BLOCK = 2048  # float32 values that a sending program copies at a time
_MERGED_ELEMENTS = 8192  # float32 values of parts that a program of 4 warps loads at a time


@triton.jit(do_not_specialize=["rank", "batch", "capacity"])
def _attend(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    batch, capacity, parts_ptr, part_elements, rank,
    WORLD: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, PAGE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    attend(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr,
        stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        batch, capacity, parts_ptr, part_elements, rank,
        WORLD, Q_HEADS, KV_HEADS, HEAD_DIM, V_DIM, PAGE, SOFT_CAP, WINDOW,
        SPLITS, BLOCK_H, BLOCK_N, XCDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _merge(
    parts_ptr, target_ptr, part_elements, rows,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
    INTO_OUTPUT: tl.constexpr,
):  # fmt: skip
    if INTO_OUTPUT:
        merge_into_output(
            tl.program_id(0), parts_ptr, target_ptr, part_elements, rows, rows > 0,
            PARTS, PARTS_BLOCK, V_DIM, ROWS,
        )  # fmt: skip
    else:
        merge_into_part(
            tl.program_id(0), parts_ptr, target_ptr, part_elements, rows,
            PARTS, PARTS_BLOCK, V_DIM, ROWS,
        )  # fmt: skip


class Attention:
    """The split of one rank's keys, ready to be launched as a kernel of its own or within another.

    Attributes:
        parts: float32 [SPLITS, part_elements] that the splits write.
        programs: that they take.
        constants, options: of their kernel.
    """

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        splits = config["SPLITS"]
        head_blocks = -(-problem.group_size // config["BLOCK_H"])
        self.parts = torch.empty(
            splits * problem.part_elements, dtype=torch.float32, device=fabric.device
        )
        self.programs = problem.batch * problem.kv_heads * head_blocks * splits
        self.constants = {
            "WORLD": problem.world_size,
            "Q_HEADS": problem.q_heads,
            "KV_HEADS": problem.kv_heads,
            "HEAD_DIM": problem.head_dim,
            "V_DIM": problem.v_head_dim,
            "PAGE": problem.page_size,
            "SOFT_CAP": problem.soft_cap,
            "WINDOW": problem.window,
            "SPLITS": splits,
            "BLOCK_H": config["BLOCK_H"],
            "BLOCK_N": config["BLOCK_N"],
            "XCDS": config.get("XCDS", 1),
        }
        self.options = compile_options(fabric.backend, config)
        self._fixed_args = (
            problem.batch, problem.kv_len_per_rank, self.parts, problem.part_elements, fabric.rank
        )  # fmt: skip
        # By filling: planning under graph capture must not copy from the host.
        self._scaling = torch.full((2,), problem.head_dim**-0.5, device=fabric.device)
        self._kernel = Kernel(_attend, self.programs, self.constants, self.options)

    def args(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with which a kernel calls ``attend``, but for the index.

        Args:
            inputs: q, k, v, kv_lens, table and scaling, as the operation's ``make_inputs`` says.
        """
        q, k, v, kv_lens, table, scaling = inputs
        return (
            q, k, v, kv_lens, kv_lens if table is None else table,
            self._scaling if scaling is None else scaling,
            *k.stride()[:3], *v.stride()[:3], *self._fixed_args,
        )  # fmt: skip

    def launch(self, inputs: Sequence[Any]) -> None:
        """Compute all parts, in a kernel of its own."""
        self._kernel(*self.args(inputs))


def merge_constants(problem: FlashDecode, parts: int, rows: int) -> dict[str, Any]:
    """Constants of a merge of so many parts, `rows` rows at a time."""
    row_elements = rows * power_of_2(problem.v_head_dim, 16)
    at_a_time = max(1, _MERGED_ELEMENTS // row_elements)
    return {
        "PARTS": parts,
        "PARTS_BLOCK": min(power_of_2(parts, 1), at_a_time),
        "V_DIM": problem.v_head_dim,
        "ROWS": rows,
    }


class Merge:
    """A kernel that merges parts into one, or into the output.

    Args:
        parts: how many.
        rows: merged by one program.
        into_output: the target is the output, not a part.
    """

    def __init__(
        self, problem: FlashDecode, fabric: Fabric, parts: int, rows: int, into_output: bool
    ) -> None:
        self._fixed_args = problem.part_elements, problem.rows
        self._kernel = Kernel(
            _merge,
            grid=-(-problem.rows // rows),
            constants=merge_constants(problem, parts, rows) | {"INTO_OUTPUT": into_output},
            options=compile_options(fabric.backend, {}),
        )

    def launch(self, parts: torch.Tensor, target: torch.Tensor) -> None:
        self._kernel(parts, target, *self._fixed_args)


class Exchange:
    """What kernels that push parts to inboxes, and combine them, are told beside their tensors.

    Args:
        chunk_rows: rows that have a signal of their own.

    Attributes:
        chunks: how many there are, each with a channel.
        combiners: programs that combine all rows.
        args: of such a kernel: inbox, slot_elements, part_elements, rows, control, heap_bases,
            rank.
        constants: WORLD, BACKEND, CHUNK_ROWS, and those of ``combine``.
        sending_constants: of a kernel that sends chunks of a part.
    """

    def __init__(
        self, problem: FlashDecode, fabric: Fabric, config: Config, chunk_rows: int
    ) -> None:
        inbox, slot_elements = fabric.pool.slots(problem.slot_bytes // 4, torch.float32)
        self.chunks = -(-problem.rows // chunk_rows)
        self.combiners = -(-problem.rows // config["OUT_ROWS"])
        self.args = (
            inbox, slot_elements, problem.part_elements, problem.rows,
            fabric.pool.control, fabric.heap_bases, fabric.rank,
        )  # fmt: skip
        merging = merge_constants(problem, problem.world_size, config["OUT_ROWS"])
        self.constants = {
            "WORLD": problem.world_size,
            "BACKEND": fabric.backend,
            "CHUNK_ROWS": chunk_rows,
            "SOURCES_BLOCK": merging["PARTS_BLOCK"],
            "V_DIM": problem.v_head_dim,
            "OUT_ROWS": config["OUT_ROWS"],
        }

        names = ("WORLD", "BACKEND", "CHUNK_ROWS", "V_DIM")
        self.sending_constants = {name: self.constants[name] for name in names} | {
            "SEND_BLOCK": _SEND_BLOCK
        }


class DecodeVariant(Variant):
    """A variant with the knobs of the splits and of the merges."""

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {
            **spaces.split_space(problem, hardware),
            **spaces.merge_space(problem, hardware),
        }

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_configs(problem, hardware, self.space(problem, hardware))

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return spaces.refuses(problem, hardware, config)


class ExchangingVariant(DecodeVariant):
    """A variant whose kernels push parts: it also has the knobs of that, and needs peers."""

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        return "one rank has no peers" if problem.world_size == 1 else None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), **spaces.push_space(problem, hardware)}
