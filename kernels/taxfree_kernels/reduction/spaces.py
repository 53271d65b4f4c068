"""Search spaces of the variants: values to search, seed configs, limits."""

from __future__ import annotations

from typing import Any

from taxfree_kernels import spaces
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import ITEM_BYTES, Config, PartialSum, Space

_CHUNK_BYTES = 1 << 13  # one sender moves this in a few microseconds
#: Most channels that tiles or chunks use if programs wait for several of them.
MOST_SIGNALS = 64
_MOST_OF_A_ROW = 1 << 14  # elements
_MOST_A_THREAD = 64  # float32 elements: a quarter of its registers


def tile_space(problem: PartialSum, hardware: Hardware) -> Space:
    """Meta-parameters of tiles of a partial sum, within the device's limits.

    Args:
        problem: with m, n and k of a rank's own matmul.
    """
    of_sum = {"TMA": ways_to_load(problem, hardware)}
    space = spaces.matmul_space(hardware, problem.m, problem.k, (1, 4, 8), (1, 2, 4), of_sum)
    return spaces.space_of_fp8(problem, space)


def exchange_unsupported_reason(problem: PartialSum) -> str | None:
    """The reason why our kernels cannot exchange partial sums, or None."""
    if problem.world_size == 1:
        return "one rank has no peers"
    if problem.elements > 1 << 30:
        return "its elements are counted in 32 bits"
    return None


def ways_to_load(problem: PartialSum, hardware: Hardware) -> tuple[bool, ...]:
    """Whether TMA may load tiles: on Hopper, if rows start at multiples of 16 bytes."""
    rows_of_w = problem.k if problem.weight_layout == "nk" else problem.n
    in_16_bytes = 16 // problem.factor_bytes
    is_aligned = problem.k % in_16_bytes == 0 and rows_of_w % in_16_bytes == 0
    has_tma = hardware.architecture in ("sm_90", "cpu")
    return (False, True) if has_tma and is_aligned else (False,)


def signal_counts(hardware: Hardware, most: int) -> tuple[int, ...]:
    """Values of SIGNALS, the most signals per peer; with fewer, more tiles share one.

    One signal for each chiplet is among them. With XCDS a chiplet computes a run of tiles. If the
    chiplets divide the tiles, the run has one signal; else its ends belong to neighbours' signals.

    Args:
        most: number of channels that the protocol has for them.
    """
    if hardware.backend == "interpreter":
        return (most, 2)
    by_chiplet = (hardware.num_xcds,) if hardware.num_xcds > 1 else ()
    return (most, most // 4, *by_chiplet)


_LONG_K = 2048  # from here on, computing a tile takes far longer than starting and storing it
FEW_RANKS = 4  # a rank keeps so large a part that tiles do not wait for links


def staggered_if_worth_it(
    problem: PartialSum, hardware: Hardware, config: Config, tiles: int
) -> dict[str, Any]:
    """`config` with staggered tiles, if that should be faster.

    Addresses of scattered columns, a bias or a residual leave too few registers for it.
    """
    is_crowded = problem.bias or problem.residual or problem.scatter_dim
    is_worth_it = problem.k >= _LONG_K and problem.world_size > FEW_RANKS and not is_crowded
    staggered = {**config, "STAGGERED": is_worth_it}
    if staggered_illegal_reason(hardware, staggered, tiles, problem.k) is not None:
        return {**staggered, "STAGGERED": False}
    return staggered


def staggered_illegal_reason(hardware: Hardware, config: Config, tiles: int, k: int) -> str | None:
    """The reason why staggered tiles cannot run or are slow, or None."""
    if not config["STAGGERED"]:
        return None
    if config["SPLIT_K"] > 1:
        return "K is split already"
    if -(-k // config["BLOCK_K"]) < 2:
        return "there is one step of K"
    if tiles <= hardware.compute_units:
        return "tiles are one wave, which ends at once"
    return None


def seed_configs(problem: PartialSum, hardware: Hardware, space: Space) -> list[dict[str, Any]]:
    """Configs that should suit a problem, moved into `space`; the first is the default."""
    rows = spaces.power_of_2(problem.m, 16)
    if hardware.backend == "interpreter":
        guesses = [{"BLOCK_M": min(rows, 32), "BLOCK_N": 64, "BLOCK_K": 64}]
    elif problem.k % 8:  # unaligned rows: no load is 16 bytes wide
        guesses = [{"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8}]
    elif hardware.backend == "hip":
        guesses = _first_on_cdna(rows)
    else:
        guesses = _first_on_hopper(problem, rows)
    guesses = spaces.for_fp8(problem, guesses)
    return spaces.allowed(problem, hardware, space, guesses, illegal_reason)


def _first_on_hopper(problem: PartialSum, rows: int) -> list[dict[str, Any]]:
    """TMA tiles are twice as fast as others in isolation; see all_gather_matmul's push_tma."""
    if rows <= 64:
        # Some 96 tiles stream the weight at full rate without a split K.
        split = 1 if problem.n >= 64 * 96 else 2
        skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP_AB": True,
                  "SPLIT_K": split, "num_warps": 4}  # fmt: skip
        return [
            skinny | {"num_stages": 5, "TMA": True},
            skinny | {"SPLIT_K": 2 * split, "num_stages": 4, "TMA": True},
            skinny | {"num_stages": 5},
            skinny | {"SPLIT_K": 2 * split, "num_stages": 4},
        ]
    wide = {"GROUP_M": 8, "BLOCK_K": 64, "SPLIT_K": 1}
    square = wide | {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 6, "TMA": True}
    widest = wide | {"BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 4, "TMA": True}
    two_at_once = square | {"num_stages": 3}  # on an SM: one computes, the other sends
    narrow = square | {"BLOCK_N": 64, "BLOCK_K": 128, "num_stages": 4}  # one tile for each SM
    most = {128: (narrow, square), 256: (square, widest), 512: (square, widest)}
    if problem.world_size > FEW_RANKS:
        most |= dict.fromkeys((1024, 2048), (square, widest))
        most |= {rows: most.get(rows, (two_at_once, widest))}
    return [
        *most.get(rows, (widest, square, two_at_once)),
        square | {"num_warps": 8},  # holds a residual as well
        wide | {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 4},
        wide | {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 4},
    ]


def _first_on_cdna(rows: int) -> list[dict[str, Any]]:
    """Configs from published experience on MI300X: two stages, and BLOCK_K 64 for wide tiles."""
    common = {"BLOCK_K": 64, "num_stages": 2, "matrix_instr_nonkdim": 16}
    if rows <= 64:
        skinny = common | {"BLOCK_M": rows, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4}
        return [skinny | {"BLOCK_N": 32, "SPLIT_K": 1}, skinny | {"BLOCK_N": 64, "SPLIT_K": 2}]
    wide = common | {"BLOCK_M": 128, "num_warps": 8}
    return [wide | {"BLOCK_N": 128, "GROUP_M": 4}, wide | {"BLOCK_N": 256, "GROUP_M": 8}]


def tiles_at_once(problem: PartialSum, hardware: Hardware, config: Config) -> int:
    """Tile programs that fit on a compute unit, by their shared memory."""
    if hardware.backend != "cuda":
        return 1
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.factor_bytes
    return int(hardware.shared_memory // (config["num_stages"] * stage))


def illegal_reason(problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
    """The reason not to compile a config, or None."""
    if config.get("WIRE") == "fp8" and not fits_registers(hardware, config):
        return "too few registers to quantise a tile"
    return spaces.fp8_illegal_reason(problem, hardware, config) or spaces.tile_illegal_reason(
        hardware, config, problem.k, problem.m * problem.n, 64, problem.factor_bytes
    )


# -- our collectives after library kernels ------------------------------------------------------


def send_space(hardware: Hardware, most_chunks: int) -> Space:
    """Meta-parameters of sending and adding a partial sum in chunks.

    Args:
        most_chunks: number of channels that the protocol has for chunks.
    """
    if hardware.backend == "interpreter":
        return {"CHUNKS": (1, 2), "SEND_BLOCK": (256,)}
    return {
        "CHUNKS": spaces.up_to(most_chunks, (1, 2, 4, 8, 16, 32, 64)),
        "SEND_BLOCK": (2048, 4096, 8192),
        "num_warps": (4, 8),
    }


def first_sends(space: Space, sent_bytes: int, row_elements: int) -> list[dict[str, Any]]:
    """Configs for a number of bytes per peer: chunks of the size that suits one sender, or near it.

    Args:
        space: from :func:`send_space`.
        row_elements: contiguous elements, if addresses jump after them.
    """
    counts = space["CHUNKS"]
    wanted = max(1, sent_bytes // _CHUNK_BYTES)
    order = spaces.nearest_first(counts, wanted)
    if row_elements % 16:  # elements are copied one by one, each with an address
        guess = {"SEND_BLOCK": 2048, "num_warps": 8}
    elif wanted <= 2 * order[0]:
        guess = {"SEND_BLOCK": 4096, "num_warps": 4}
    else:
        guess = {"SEND_BLOCK": 8192, "num_warps": 8}
    return [spaces.within(space, guess | {"CHUNKS": count}) for count in order]


def most_sent(problem: Any) -> int:
    """Elements that 8 warps send at once in a sum of two shots, at most.

    8192 spill with an addend under Triton 3.7, and of two ranks under 3.6; without one 4096 of
    eight ranks spill there.
    """
    return 4096 if problem.world_size == 2 or problem.bias or problem.residual else 8192


def words_illegal_reason(
    hardware: Hardware, config: Config, words: int, world_size: int, most: int = 32
) -> str | None:
    """The reason why a program cannot poll `words` words from each rank, or None.

    Args:
        most: limit of words per thread, from all ranks.
    """
    if hardware.backend == "interpreter":
        return None
    threads = config["num_warps"] * hardware.warp_size
    if words < threads:
        return f"{threads} threads for {words} words"
    if spaces.power_of_2(world_size, 1) * words > most * threads:
        return f"more than {most} words a thread from {world_size} ranks"
    return None


def partial_bytes(problem: PartialSum) -> int:
    """Bytes of a rank's partial sum in the problem's dtype."""
    return problem.elements * ITEM_BYTES[problem.dtype]


def padded_columns(n: int) -> int:
    """Columns of a row in an inbox: a multiple of 16, so that rows are 16-byte aligned."""
    return -(-n // 16) * 16


def padded_elements(m: int, n: int) -> int:
    """Elements of an inbox for [m, n]: a multiple of 256 bytes in any type."""
    return -(-m * padded_columns(n) // 128) * 128


def tiles_of(m: int, n: int, block_m: int, block_n: int) -> int:
    """Number of tiles of [m, n], including partial ones."""
    return -(-m // block_m) * -(-n // block_n)


def tiles_in(problem: PartialSum, config: Config) -> int:
    """Number of tiles of a partial sum."""
    return tiles_of(problem.m, problem.n, config["BLOCK_M"], config["BLOCK_N"])


def tiles_per_signal(tiles: int, config: Config) -> int:
    """Number of tiles that share a signal."""
    return int(-(-tiles // config["SIGNALS"]))


def staggered_tiles(hardware: Hardware, config: Config) -> int:
    """Number of tiles that two programs share if tiles are staggered, else 0.

    Tiles of the plan's problem are more than compute units, and a plan is dispatched for no fewer
    rows than half of its problem's: there always are so many tiles.
    """
    return max(1, hardware.compute_units // 2) if config["STAGGERED"] else 0


def lanes_of(hardware: Hardware, config: Config, words: int) -> int:
    """Lanes, a power of two, of a block [ranks, lanes] that holds `words` words of each rank.

    Each thread loads 16 bytes. With enough lanes, each thread holds the same lanes of all ranks,
    and adds them without other threads.
    """
    if hardware.backend == "interpreter":
        return 2 * words  # more lanes than words, as on a GPU with few rows
    return max(words, 4 * config["num_warps"] * hardware.warp_size)


# -- limits of programs that hold bias and residual, or a row for RMSNorm, in registers -----------


def fits_addends(problem: PartialSum, hardware: Hardware, config: Config, pieces: int = 1) -> bool:
    """Whether a program that adds one of `pieces` of a tile can also hold bias and residual.

    With RMSNorm, programs add rows instead.
    """
    has_addends = (problem.bias or problem.residual) and not problem.rms_norm
    return not has_addends or fits_registers(hardware, config, pieces)


def addends_illegal_reason(
    problem: PartialSum, hardware: Hardware, config: Config, pieces: int = 1
) -> str | None:
    """The reason why a program cannot add one of `pieces` of a tile, with its addends, or None.

    A record without addends may serve a problem that has some: there its config would spill.
    """
    fits = fits_addends(problem, hardware, config, pieces)
    return None if fits else "too few registers for a tile with bias or residual"


def fits_registers(hardware: Hardware, config: Config, pieces: int = 1) -> bool:
    """Whether a program that holds one of `pieces` of a tile has room for more than the sum."""
    if hardware.backend != "cuda":
        return True
    threads = pieces * config["num_warps"] * hardware.warp_size
    return int(config["BLOCK_M"] * config["BLOCK_N"]) <= _MOST_A_THREAD * threads


def rows_unsupported_reason(problem: PartialSum) -> str | None:
    """The reason why no program can hold a row for RMSNorm, or None."""
    if problem.rms_norm and problem.n > _MOST_OF_A_ROW:
        return f"one program normalises a row, of {_MOST_OF_A_ROW} elements at most"
    return None


def warps_illegal_reason(problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
    """The reason why a config's programs cannot hold a row for RMSNorm, or None."""
    if not problem.rms_norm or hardware.backend == "interpreter":
        return None
    lanes, threads = spaces.power_of_2(problem.n, 1), config["num_warps"] * hardware.warp_size
    if lanes > _MOST_A_THREAD * threads:
        return f"{lanes // threads} elements of a row a thread"
    return None


def with_room_for_rows(problem: PartialSum, hardware: Hardware, config: Config) -> dict[str, Any]:
    """`config` with enough warps to hold a row for RMSNorm."""
    if warps_illegal_reason(problem, hardware, config) is None:
        return dict(config)
    lanes = spaces.power_of_2(problem.n, 1)
    return {**config, "num_warps": lanes // (_MOST_A_THREAD * hardware.warp_size)}
