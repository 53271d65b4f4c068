"""Search spaces of the fused variants: values to search, seed configs, limits."""

from __future__ import annotations

from typing import Any

from taxfree_kernels import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device.peers import CHANNELS
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import is_triton
from taxfree_kernels.variant import BLOCK, Config, Space


def unsupported_reason(problem: AllGatherMatmul) -> str | None:
    """The reason why our kernels cannot gather for a problem, or None."""
    if problem.world_size == 1:
        return "one rank has no peers"
    if problem.gathered_elements > 1 << 30:
        return "its elements are counted in 32 bits"
    return None


def tile_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """Meta-parameters of tiles, within the device's limits."""
    world_size = problem.world_size
    splits: tuple[int, ...] = (1, 2, 3, 4, 8)
    waits = tuple(dict.fromkeys((world_size, -(-world_size // 2), min(2, world_size), 1)))
    if hardware.backend == "interpreter":
        splits, waits = (1, 2, 4, 8), (world_size, 1)
    of_gather = {"SOURCES_PER_WAIT": waits}
    space = spaces.matmul_space(
        hardware, problem.m, problem.shard_columns, (1, 2, 4, 8), splits, of_gather
    )
    return spaces.space_of_fp8(problem, space)


def tma_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """Meta-parameters of tiles that are loaded by TMA, and of their senders."""
    space = {**tile_space(problem, hardware), **send_space(problem, hardware)}
    # With gather_dim 1 each source's shard is a part of K.
    parts = (1, 2, 4, 8) if problem.gather_dim == 0 else (1,)
    if hardware.backend == "interpreter":
        return {**space, "SENDERS": (1, 2, 64), "K_PARTS": parts[:2], "SEND_STAGES": (1, 2)}
    of_tma = {
        "K_PARTS": parts,
        "SEND_STAGES": (1, 4),
        "BLOCK_K": spaces.up_to(spaces.power_of_2(problem.shard_columns, 64), (64, 128)),
        "num_stages": (3, 4, 5, 6),
        "CHUNKS": spaces.up_to(problem.shard_rows, (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)),
        "SENDERS": (8, 12, 16, 18, 20, 24, 32, 64, 512),
        "SEND_BLOCK": (8192, 16384, 32768),
    }
    return spaces.space_of_fp8(problem, {**space, **of_tma})


def send_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """Meta-parameters of senders."""
    if hardware.backend == "interpreter":
        return {"CHUNKS": spaces.up_to(problem.shard_rows, (1, 2)), "SEND_BLOCK": (1024,)}
    chunks = spaces.up_to(problem.shard_rows, (1, 2, 4, 8, 16, 32, 64))
    return {"CHUNKS": chunks, "SEND_BLOCK": (2048, 4096, 8192)}


SEND_BLOCK = 8192


def send_block(problem: AllGatherMatmul, hardware: Hardware) -> int:
    """Elements that a sender of ``one_shot`` copies at a time; unaligned ones have addresses."""
    if hardware.backend == "interpreter":
        return 1024
    return SEND_BLOCK if _is_aligned(problem) else SEND_BLOCK // 4


def _is_aligned(problem: AllGatherMatmul) -> bool:
    """Whether rows of a shard start at multiples of 16 bytes."""
    return problem.shard_columns * problem.factor_bytes % 16 == 0


def seed_configs(
    problem: AllGatherMatmul, hardware: Hardware, space: Space
) -> list[dict[str, Any]]:
    """Configs that won on similar shapes, moved into `space`; the first is the default."""
    rows = spaces.power_of_2(problem.m, 16)
    if hardware.backend == "interpreter":
        guesses = [_first_interpreted(rows)]
    elif not _is_aligned(problem):  # no load is 16 bytes wide
        guesses = [{"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8}]
    elif hardware.backend == "hip":
        guesses = _first_on_cdna(rows)
    else:
        guesses = _first_on_hopper(rows, sending_chunks(problem))
        if is_triton(3, 8):
            guesses += [guess | {"SOURCES_PER_WAIT": 1} for guess in guesses]
    return spaces.allowed(
        problem, hardware, space, spaces.for_fp8(problem, guesses), illegal_reason
    )


def _first_interpreted(rows: int) -> dict[str, Any]:
    return {"BLOCK_M": min(rows, 32), "BLOCK_N": 64, "BLOCK_K": 64, "CHUNKS": 1}


def sending_chunks(problem: AllGatherMatmul) -> int:
    """The number of chunks of some 32 KiB, which a sender moves in a few microseconds."""
    shard_bytes = problem.shard_rows * problem.shard_columns * problem.factor_bytes
    return max(1, min(64, shard_bytes >> 15))


def _first_on_hopper(rows: int, chunks: int) -> list[dict[str, Any]]:
    if rows <= 64:
        skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP_AB": True,
                  "num_warps": 4, "SEND_BLOCK": 8192}  # fmt: skip
        return [
            skinny | {"SPLIT_K": 4, "num_stages": 5, "CHUNKS": 2 * chunks},
            skinny | {"SPLIT_K": 4, "num_stages": 3, "CHUNKS": 4 * chunks},
            skinny | {"SPLIT_K": 4, "num_stages": 3, "CHUNKS": 2 * chunks},
            skinny | {"SPLIT_K": 2, "num_stages": 5, "CHUNKS": 4 * chunks},
        ]
    wide = {"GROUP_M": 8, "BLOCK_K": 64, "CHUNKS": chunks, "SEND_BLOCK": 8192}
    eight = wide | {"BLOCK_M": 128, "SPLIT_K": 1, "num_warps": 8}
    four = wide | {"SPLIT_K": 2, "num_warps": 4, "num_stages": 4}
    return [
        eight | {"BLOCK_N": 128, "num_stages": 4},
        eight | {"BLOCK_N": 256, "num_stages": 3},
        four | {"BLOCK_M": 64, "BLOCK_N": 128},
        four | {"BLOCK_M": 128, "BLOCK_N": 64},
    ]


def first_tma_configs(
    problem: AllGatherMatmul, hardware: Hardware, space: Space
) -> list[dict[str, Any]]:
    """Seed configs of TMA tiles; see :func:`seed_configs`.

    For each M, these tiles were the fastest in isolation on H200. From M = 128 on they leave one
    compute unit to each sender, so that all programs are resident at once: a tile that starts only
    after a sender has ended is too late.
    """
    rows, chunks = spaces.power_of_2(problem.m, 16), sending_chunks(problem)
    skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP_AB": True,
              "SPLIT_K": 2, "num_warps": 4, "num_stages": 4}  # fmt: skip
    staged = {"SEND_STAGES": 4}
    if hardware.backend == "interpreter":
        guesses = [_first_interpreted(rows)]
    elif rows <= 64:
        all_at_once = {"CHUNKS": chunks, "SENDERS": 512, "SEND_BLOCK": 8192}
        guesses = [
            skinny | all_at_once,
            skinny | all_at_once | {"CHUNKS": 2 * chunks, "num_stages": 6},
            skinny | all_at_once | {"CHUNKS": 2 * chunks, "SPLIT_K": 4, "num_stages": 3},
        ]
    elif rows == 128:
        few, more = (_one_round(problem, skinny, senders) for senders in (12, 18))
        guesses = [more, *_as_it_comes(problem, skinny)[:1], few]
    elif rows <= 2048:
        tiles = {256: _SQUARE | {"SPLIT_K": 2}, 512: _SQUARE}.get(rows, _WIDE)
        # Each peer gets equally many messages: on 8 ranks 7 of 12 senders have one, and 14 of 18.
        order = (12, 18) if problem.world_size <= 4 else (18, 12)
        guesses = [
            *_as_it_comes(problem, tiles),
            *(_one_round(problem, tiles | staged, senders) for senders in order),
            _one_round(problem, _WIDE | staged | {"SPLIT_K": 2}, order[0]),
        ]
    else:  # many waves of tiles: chunks that arrive one after the other
        guesses = [
            _WIDE | staged | {"CHUNKS": 16, "SENDERS": count, "SEND_BLOCK": 16384}
            for count in (24, 20, 12)
        ]
    waits = {"SOURCES_PER_WAIT": problem.world_size, "K_PARTS": 1, "SEND_STAGES": 1}
    guesses = spaces.for_fp8(problem, [waits | guess for guess in guesses])
    return spaces.allowed(problem, hardware, space, guesses, tma_illegal_reason)


#: meta-parameters of ``push_tma`` that have no meaning where warps have roles
_OF_LOOPS = ("K_PARTS", "SEND_STAGES")


def specialized_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """Meta-parameters of tiles whose warps have roles."""
    space: dict[str, tuple[Any, ...]] = {**tma_space(problem, hardware)}
    if hardware.backend != "interpreter":
        if problem.m <= 8:
            space["BLOCK_M"] = (8, *space["BLOCK_M"])
        space |= {
            "BLOCK_K": spaces.up_to(spaces.power_of_2(problem.shard_columns, 64), (64, 128, 256)),
            "num_warps": (4,),
            "num_stages": (3, 4, 5, 6, 7, 8, 9, 11, 14),
            "FOLD": (1, 2),
        }
        if problem.is_fp8:
            space |= {"BLOCK_K": (BLOCK,), "num_stages": (*space["num_stages"], 16, 20)}
            space["FOLD"] = (1,)
    return {name: values for name, values in space.items() if name not in _OF_LOOPS}


def first_specialized_configs(
    problem: AllGatherMatmul, hardware: Hardware, space: Space
) -> list[dict[str, Any]]:
    """Seed configs of tiles whose warps have roles; see :func:`seed_configs`.

    For each M, these tiles were the fastest in isolation on H200. Stages fill shared memory, so a
    program has a compute unit for itself, and programs of the next call begin where one has ended.
    At most 16 programs send, and tiles leave a unit free for each. From M = 128 on each sends
    several messages, in the order in which tiles need them.
    """
    rows, world = spaces.power_of_2(problem.m, 16), problem.world_size
    messages, sources = {16: 8, 32: 16, 64: 16}.get(rows, 64), world if rows <= 64 else 1
    sent: dict[str, Any] = {
        "CHUNKS": max(1, messages // max(1, world - 1)),
        "SENDERS": 16,
        "SEND_BLOCK": 16384,
        "SOURCES_PER_WAIT": sources,
    }
    skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP_AB": True,
              "SPLIT_K": 2}  # fmt: skip
    if hardware.backend == "interpreter":
        guess = _first_interpreted(rows)
    elif rows == 16 and not problem.is_fp8 and problem.shard_columns % 16 == 0:  # two parts of K
        least = spaces.power_of_2(problem.m, 8)
        guess = skinny | {
            "BLOCK_M": least, "BLOCK_N": 32, "BLOCK_K": 256, "SPLIT_K": 1, "FOLD": 2,
            "num_stages": 11 if least == 8 else 9,
        }  # fmt: skip
    elif rows <= 64:
        most = 7 - (problem.scales == "block")  # whose scales are in shared memory, too
        guess = skinny | {"num_stages": {16: 10, 32: 9}.get(rows, most)}
    elif rows == 128 and not problem.is_fp8:  # whose sums and products do not fit registers so
        guess = skinny | {"BLOCK_K": 64, "num_stages": 9}
    elif rows <= 256:
        stages = 6 if problem.is_fp8 else 7  # 16 KiB turn a product, whose rows have scales
        guess = _SQUARE | {"SPLIT_K": 2, "GROUP_M": 2, "num_stages": stages}
    else:
        guess = (_SQUARE if rows == 512 else _WIDE) | {"SPLIT_K": 1, "GROUP_M": 4}
    guesses = [sent | guess]
    if rows == 64 and problem.is_fp8:  # of 128 columns, where these fill whole rounds of programs
        guesses.append(sent | skinny | {"BLOCK_N": 128, "SPLIT_K": 1, "num_stages": 4})
    guesses = spaces.for_fp8(problem, guesses)
    return spaces.allowed(problem, hardware, space, guesses, specialized_illegal_reason)


_SQUARE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4,
           "num_stages": 6}  # fmt: skip
_WIDE = _SQUARE | {"BLOCK_N": 256, "num_warps": 8, "num_stages": 4}


def _as_it_comes(problem: AllGatherMatmul, tiles: Config) -> list[dict[str, Any]]:
    """Configs whose tiles begin with the first part of K, or with the first sources.

    The rest arrives meanwhile. Each wait costs a pipeline refill. On four H200s the first of these
    configs took 0.84x to 0.98x of the time of tiles that wait once.
    """
    staged = {**tiles, "SEND_STAGES": 4}
    if problem.gather_dim == 0:
        parts = (2, 4) if "SPLIT_K" in tiles else (4, 2)
        return [_one_round(problem, staged | {"K_PARTS": count}, 16) for count in parts]
    in_turn = staged | {"CHUNKS": 8, "SENDERS": 16, "SEND_BLOCK": 16384}
    peers = problem.world_size - 1
    sources = (2, 4, 1) if peers > 4 else (2, 1)
    return [in_turn | {"SOURCES_PER_WAIT": count} for count in sources if count < peers]


def _one_round(problem: AllGatherMatmul, tiles: Config, senders: int) -> dict[str, Any]:
    """A config in which each of a few senders has one message of each part."""
    receivers = max(1, problem.world_size - 1 + sends_to_self(problem, {"K_PARTS": 1, **tiles}))
    return {
        **tiles,
        "CHUNKS": max(1, senders // receivers),
        "SENDERS": senders,
        "SEND_BLOCK": 16384,
    }


def _first_on_cdna(rows: int) -> list[dict[str, Any]]:
    """Configs from common practice on MI300X: two stages, and BLOCK_K 64 for wide tiles."""
    common = {"BLOCK_K": 64, "num_stages": 2, "matrix_instr_nonkdim": 16, "SEND_BLOCK": 8192}
    if rows <= 64:
        skinny = common | {"BLOCK_M": rows, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4}
        return [
            skinny | {"BLOCK_N": 64, "SPLIT_K": 4, "CHUNKS": 1},
            skinny | {"BLOCK_N": 32, "SPLIT_K": 2, "CHUNKS": 4},
        ]
    wide = common | {"BLOCK_M": 128, "SOURCES_PER_WAIT": 1, "num_warps": 8}
    return [
        wide | {"BLOCK_N": 256, "GROUP_M": 8, "CHUNKS": 8},
        wide | {"BLOCK_N": 128, "GROUP_M": 4, "CHUNKS": 4},
        wide | {"BLOCK_M": 256, "BLOCK_N": 256, "GROUP_M": 8, "CHUNKS": 16},
    ]


def illegal_reason(problem: AllGatherMatmul, hardware: Hardware, config: Config) -> str | None:
    """The reason not to compile a config, or None."""
    tile = config["BLOCK_M"] * config["BLOCK_N"] if hardware.backend == "cuda" else 0
    if tile > 128 * 128 and 1 < config["SOURCES_PER_WAIT"] < problem.world_size:
        # The loop after a wait may have no steps, for all ptxas knows: it serialises wgmma.
        return "matrix instructions would run one by one"
    waits_once = problem.gather_dim == 1 and config["SOURCES_PER_WAIT"] == problem.world_size
    if tile >= 64 * 128 and waits_once and is_triton(3, 8):
        return "Triton 3.8 would run its matrix instructions one by one"
    return _tile_illegal_reason(problem, hardware, config)


def _tile_illegal_reason(
    problem: AllGatherMatmul, hardware: Hardware, config: Config
) -> str | None:
    columns, outputs = problem.shard_columns, problem.m * problem.n
    return spaces.fp8_illegal_reason(problem, hardware, config) or spaces.tile_illegal_reason(
        hardware, config, columns, outputs, 128, problem.factor_bytes
    )


def specialized_illegal_reason(
    problem: AllGatherMatmul, hardware: Hardware, config: Config
) -> str | None:
    """The reason not to compile a config of tiles whose warps have roles, or None."""
    block_m, block_n, fold = config["BLOCK_M"], config["BLOCK_N"], config.get("FOLD", 1)
    longer, other = (fold * block_n, fold * block_m) if config["SWAP_AB"] else (block_m, block_n)
    if fold > 1 and (not config["SWAP_AB"] or longer != 64 or config["SPLIT_K"] > 1):
        return "FOLD is for products with SWAP_AB of 32 columns, in one share of K"
    if problem.shard_columns * problem.factor_bytes % (16 * fold):
        return "parts of K do not start at multiples of 16 bytes"
    if hardware.backend != "interpreter" and (longer not in (64, 128) or other > 256):
        return "a warpgroup has 64 rows of its product, and a program one or two warpgroups"
    whole = {"SOURCES_PER_WAIT": 1, "K_PARTS": 1, **config}
    if longer == 128:
        whole["num_warps"] = 2 * config.get("num_warps", 4)
    return tma_illegal_reason(problem, hardware, whole)


def tma_illegal_reason(problem: AllGatherMatmul, hardware: Hardware, config: Config) -> str | None:
    """Like :func:`illegal_reason`, but wide tiles may wait for a few sources at a time.

    This kernel asserts that the loop after a wait has steps.
    """
    parts, steps = config["K_PARTS"], -(-problem.shard_columns // config["BLOCK_K"])
    last = steps - (parts - 1) * steps_of_part(problem, config)
    if parts > 1 and last < config["SPLIT_K"]:
        return f"K_PARTS {parts} leaves a split of a part without a step of k"
    if parts * config["CHUNKS"] > CHANNELS:
        return f"{parts * config['CHUNKS']} channels, of which there are {CHANNELS}"
    return _tile_illegal_reason(problem, hardware, config)


def sends_to_self(problem: AllGatherMatmul, config: Config) -> bool:
    """Whether tiles read own rows from the inbox: tiles mix ranks' rows, or rows are in parts."""
    return problem.tiles_mix_ranks(config["BLOCK_M"]) or config["K_PARTS"] > 1


def steps_of_part(problem: AllGatherMatmul, config: Config) -> int:
    """Steps of BLOCK_K in each of the K_PARTS parts except the last."""
    return -(-problem.shard_columns // (config["K_PARTS"] * config["BLOCK_K"]))
