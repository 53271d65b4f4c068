"""Search spaces of the variants: values to search, seed configs, limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taxfree_kernels import spaces
from taxfree_kernels.device.peers import CHANNELS, LAMPORT_SLOT_BYTES, LL_SLOT_BYTES
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Space

_FEW_RANKS = 4  # up to this many ranks, sending a row to each as words is cheap
_MOST_WORDS = 8192  # values that a program of 4 warps polls at a time
_UNDER_WAY = 8_600_000  # bytes: what 4.3 TB/s deliver in the 2 us that a load takes
_WAVES = (1, 2, 3, 4, 6, 8)  # programs per compute unit up to which splitting is worth it


def split_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """Meta-parameters of a rank's attention to its own keys."""
    heads = spaces.power_of_2(problem.group_size, 16)
    if hardware.backend == "interpreter":  # its time depends on the number of operations
        return {"BLOCK_H": spaces.up_to(heads, (16, 32)), "BLOCK_N": (16, 32), "SPLITS": (1, 2)}
    space: dict[str, tuple[Any, ...]] = {
        "BLOCK_H": spaces.up_to(heads, (16, 32, 64)),
        "BLOCK_N": (32, 64, 128),
        "SPLITS": tuple(sorted({splits_of(problem, hardware, waves) for waves in _WAVES})),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5, 6),
    }
    if problem.page_size and hardware.backend == "cuda":  # page numbers must be loaded before keys
        space["num_stages"] = (3, 4, 5, 6)
    if hardware.backend == "hip":
        space |= spaces.cdna_space(hardware)
        space["num_stages"] = (2, 3, 4)  # with more, paged loads on CDNA are lane by lane
    return space


def splits_of(problem: FlashDecode, hardware: Hardware, waves: int) -> int:
    """Splits per sequence that give at most `waves` programs per compute unit."""
    most = -(-problem.kv_len_per_rank // 64)
    return max(1, min(most, hardware.compute_units * waves // _columns(problem)))


def _columns(problem: FlashDecode) -> int:
    """Programs of one split of every sequence, with the most heads per program."""
    heads = min(64, spaces.power_of_2(problem.group_size, 16))
    return problem.batch * problem.kv_heads * -(-problem.group_size // heads)


def merge_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """Meta-parameters of the merge of all ranks' parts."""
    values = (2, 4) if hardware.backend == "interpreter" else (1, 2, 4, 8)
    return {"OUT_ROWS": spaces.up_to(spaces.power_of_2(problem.rows, 1), values)}


def push_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """Meta-parameters of sending: rows merged at a time, and chunks with one signal each."""
    rows = spaces.power_of_2(problem.rows, 1)
    if hardware.backend == "interpreter":
        return {"ROWS": spaces.up_to(rows, (2, 4)), "CHUNKS": spaces.up_to(rows, (1, 3))}
    return {
        "ROWS": spaces.up_to(rows, (1, 2, 4, 8, 16)),
        "CHUNKS": spaces.up_to(min(rows, CHANNELS), (1, 4, 16, 32, 64, 128)),
    }


def words_space(problem: FlashDecode) -> Space:
    """LL and PACKED: send parts as LL packets, as packed Lamport words, or with signals."""
    packed = (False, True) if problem.v_head_dim % 2 == 0 else (False,)
    fits = any(_fits_words(problem, is_packed) for is_packed in packed)
    return {"LL": (False, True) if fits else (False,), "PACKED": packed if fits else (False,)}


def _fits_words(problem: FlashDecode, packed: bool) -> bool:
    words = problem.world_size * words_of_part(problem, packed)
    return 4 * words <= LAMPORT_SLOT_BYTES if packed else 8 * words <= LL_SLOT_BYTES


def last_space(hardware: Hardware) -> Space:
    """Meta-parameters of the kernel after the splits: its early launch, and its warps."""
    warps = {} if hardware.backend == "interpreter" else {"MERGE_WARPS": (4, 2)}
    return {**spaces.pdl_space(hardware), **warps}


def chained_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """CHAINED: launch the splits, too, before the preceding kernel has ended.

    It is tried first on one rank, where it was measured. Interpreted, the checker draws which
    kernels begin early, so that there it is whether the call's last kernel lets the next begin.
    """
    values = (True, False) if problem.world_size == 1 else (False, True)
    return {"CHAINED": values} if hardware.backend in ("cuda", "interpreter") else {}


def by_warp_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """BY_WARP: each warp has keys of its own."""
    can = hardware.backend == "cuda" and by_warp_unsupported_reason(problem) is None
    return {"BY_WARP": (False, True) if can else (False,)}


def by_warp_unsupported_reason(problem: FlashDecode) -> str | None:
    """Why BY_WARP does not serve a problem, or None."""
    if problem.window:
        return "not written for windows"
    if problem.kv_scales != "none":
        return "its warps read keys and values in 16 bits"
    if problem.head_dim != problem.v_head_dim or problem.head_dim not in (64, 128):
        return "written for heads of 64 or 128 elements"
    return None


def seed_configs(
    problem: FlashDecode, hardware: Hardware, space: Space | None = None
) -> list[dict[str, Any]]:
    """Seed configs, moved into `space`; the first is the default.

    Without a space, they have the meta-parameters of the splits and of the last merge.
    """
    if space is None:
        space = {**split_space(problem, hardware), **merge_space(problem, hardware)}
    signals = {
        "ROWS": max(1, min(16, problem.rows // 48)),
        "CHUNKS": 64,
        "OUT_ROWS": 1,
        "MERGE_WARPS": 2 if problem.world_size == 1 else 4,
    }
    words = {
        "LL": True,
        "PACKED": _is_packed_first(problem, space),
        "CHUNKS": 1,
        "ROWS": 2,
        "MERGE_WARPS": 4 if problem.rows <= hardware.compute_units else 2,
    }
    if hardware.backend == "interpreter":
        guesses = [{"SPLITS": 2, "OUT_ROWS": 4, "CHUNKS": 3}]
    elif hardware.backend == "hip":
        guesses = _first_on_cdna(problem, hardware, signals)
    else:
        has_words = True in space.get("LL", ())
        guesses = _first_on_hopper(problem, hardware, signals, words if has_words else {})
        if True in space.get("BY_WARP", ()):
            guesses.insert(1, guesses[0] | _first_by_warp(problem, hardware))
    return runnable(problem, hardware, [spaces.within(space, guess) for guess in guesses])


def _first_by_warp(problem: FlashDecode, hardware: Hardware) -> dict[str, Any]:
    """What was fastest on an H200; with pages, two programs per SM of two blocks in flight each."""
    waves, stages = (2, 3) if problem.page_size else (1, 5 if problem.batch == 1 else 4)
    return {
        "BY_WARP": True,
        "CHAINED": True,
        "SPLITS": splits_of(problem, hardware, waves),
        "BLOCK_H": 16,
        "BLOCK_N": 64,
        "num_warps": 4,
        "num_stages": stages,
    }


def _is_packed_first(problem: FlashDecode, space: Space) -> bool:
    """Whether the first seed config is PACKED: with many ranks, or if LL packets do not fit."""
    can = True in space.get("PACKED", ())
    return can and (problem.world_size > _FEW_RANKS or not _fits_words(problem, packed=False))


def runnable(
    problem: FlashDecode, hardware: Hardware, configs: Sequence[Config]
) -> list[dict[str, Any]]:
    """The configs that pass :func:`illegal_reason`, without duplicates."""
    return [
        config
        for config in spaces.distinct(configs)
        if illegal_reason(problem, hardware, config) is None
    ]


def _first_on_hopper(
    problem: FlashDecode, hardware: Hardware, signals: Config, words: Config
) -> list[dict[str, Any]]:
    """Configs whose programs are all resident at once, with 64 KiB or more in flight per SM.

    One stage of 64 keys is 32 KiB at the paper's dimensions; the pipeline has one buffer fewer than
    stages. Nothing is split if whole sequences keep the memory busy. If one program per SM would
    leave many SMs idle, there are more programs, each with fewer keys.
    """
    dims = problem.head_dim + problem.v_head_dim
    keys = 64 if dims <= 256 and problem.is_aligned else 32
    tables = 2 if problem.page_size else 0  # stages for loads of page numbers
    warps = 4 if problem.group_size <= 32 and problem.is_aligned else 8
    common = {"BLOCK_H": 64, "num_warps": warps, **signals, **words}

    def guess(waves: int, stages: int, block_n: int = keys, **others: Any) -> dict[str, Any]:
        splits = splits_of(problem, hardware, waves)
        if not problem.is_aligned:  # loads in flight are in registers
            stages = min(stages, 3)
        sizes = {"BLOCK_N": block_n, "num_stages": stages + tables}
        return common | {"SPLITS": splits} | sizes | others

    def leaves_idle(waves: int, stages: int) -> bool:
        splits = splits_of(problem, hardware, waves)
        programs = splits * _columns(problem)
        if splits == 1:
            return programs * (stages - 1) * keys * dims * problem.kv_bytes < _UNDER_WAY
        rounds = -(-programs // hardware.compute_units)
        return programs < 0.9 * rounds * hardware.compute_units

    ways = ((1, 4), (2, 4), (4, 4), (3, 3))
    if problem.page_size:  # more programs, because each waits for page numbers
        ways = ((3, 3), (2, 4), (4, 4), (1, 4))
    resident = sorted(ways, key=lambda waves: leaves_idle(*waves))
    by_signals = guess(*resident[0], **signals, LL=False, PACKED=False)
    # Each row's words go to all ranks: with many ranks use one program per row, or signals.
    is_many = problem.world_size > _FEW_RANKS
    to_many = [guess(*resident[0], ROWS=1), by_signals] if words and is_many else []
    other_words = {**words, "PACKED": not words["PACKED"]} if words else {}
    return [
        guess(*resident[0]),
        *to_many,
        guess(*resident[0], **other_words),
        guess(*resident[0], CHAINED=True),
        guess(*resident[1]),
        guess(*resident[2]),
        guess(1, 4, 2 * keys, num_warps=8),
        guess(8, 4),
        guess(1, 6),
        by_signals,
    ]


def _first_on_cdna(
    problem: FlashDecode, hardware: Hardware, signals: Config
) -> list[dict[str, Any]]:
    """Configs with two stages, which fit into 64 KiB together."""
    warps = 4 if problem.is_aligned else 8
    common = {"BLOCK_H": 64, "BLOCK_N": 32, "num_warps": warps, "num_stages": 2, **signals}
    wider = 64 if problem.head_dim + problem.v_head_dim <= 256 else 32
    return [
        common | {"SPLITS": splits_of(problem, hardware, waves), "BLOCK_N": keys}
        for waves, keys in ((2, 32), (4, 32), (2, wider))
    ]


def illegal_reason(problem: FlashDecode, hardware: Hardware, config: Config) -> str | None:
    """The reason not to compile a config, or None."""
    if config.get("PACKED") and not config["LL"]:
        return "values are packed into words only"
    if config.get("LL") and not _fits_words(problem, config["PACKED"]):
        return "the words of all ranks do not fit a slot"
    if hardware.backend == "interpreter":
        return None
    blocks = -(-problem.kv_len_per_rank // config["BLOCK_N"])
    if config["SPLITS"] > blocks:
        return f"SPLITS {config['SPLITS']} of {blocks} blocks of keys"
    by_warp = (16, 16 * config["num_warps"])
    if config.get("BY_WARP") and (config["BLOCK_H"], config["BLOCK_N"]) != by_warp:
        return "a program has 16 query heads, and a warp 16 keys of a block"
    dims = spaces.power_of_2(problem.head_dim, 16) + spaces.power_of_2(problem.v_head_dim, 16)
    shared = (config["num_stages"] - 1) * config["BLOCK_N"] * dims * problem.kv_bytes
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    if config.get("LL"):
        if config["CHUNKS"] > 1:
            return "chunks are for signals, which words do not need"
        values = spaces.power_of_2(problem.v_head_dim, 16)
        loads = 1 if config["PACKED"] else 2  # for each value
        words = loads * spaces.power_of_2(problem.world_size, 1) * config["OUT_ROWS"] * values
        if words > _MOST_WORDS:
            return f"{words} words are polled at a time"
    threads = config["num_warps"] * hardware.warp_size
    held = config["BLOCK_H"] * (dims + 2 * config["BLOCK_N"])
    if held > spaces.accumulators(hardware) * threads:
        return f"a query and accumulators of {held // threads} registers a thread"
    return None


def chunk_rows(problem: FlashDecode, config: Config) -> int:
    """Rows of a chunk: at most CHUNKS chunks of whole tiles; with LL, one tile per chunk."""
    if config.get("LL"):
        return int(config["ROWS"])
    tiles = -(-problem.rows // config["ROWS"])
    return int(config["ROWS"] * -(-tiles // config["CHUNKS"]))


def words_of_part(problem: FlashDecode, packed: bool) -> int:
    """Words of one part, a multiple of 64: Lamport words for packed rows, else LL packets."""
    if not packed:
        return problem.part_elements
    return -(-problem.rows * (problem.v_head_dim // 2 + 4) // 64) * 64
