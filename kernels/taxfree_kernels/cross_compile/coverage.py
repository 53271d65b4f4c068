"""The problems and configs that the assembly checks compile, one for each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from taxfree_kernels import variant as registry
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import Config, Variant

#: one device per architecture.
DEVICES = ("h200", "mi300x", "mi350x")


@dataclass(frozen=True)
class Example:
    """A problem that stands for a kind.

    Args:
        fields: of the operation's problem.
        aligned: all rows start at multiples of 16 bytes, so that accesses can be wide.
    """

    fields: Config
    aligned: bool = True


_GROUPED = {"q_heads": 96, "kv_heads": 12, "head_dim": 128, "world_size": 8}  # the paper's

#: operation -> its examples: few rows, many rows, the other layouts, ragged.
EXAMPLES: dict[str, tuple[Example, ...]] = {
    "all_gather_matmul": (
        Example({"m": 16, "n": 7168, "k": 8192, "world_size": 8}),
        Example({"m": 4096, "n": 4096, "k": 8192, "world_size": 8, "dtype": "bfloat16"}),
        Example({"m": 64, "n": 4096, "k": 4096, "world_size": 8, "gather_dim": 0, "bias": True}),
        Example(
            {"m": 1024, "n": 4096, "k": 4096, "world_size": 4}
            | {"gather_dim": 0, "weight_layout": "kn"}
        ),
        Example({"m": 77, "n": 1000, "k": 8 * 129, "world_size": 8}, aligned=False),
        Example({"m": 50, "n": 1001, "k": 1033, "world_size": 2, "gather_dim": 0}, aligned=False),
    ),
    "matmul_all_reduce": (
        Example({"m": 16, "n": 8192, "k": 1024, "world_size": 8, "residual": True}),
        Example(
            {"m": 1024, "n": 8192, "k": 3584, "world_size": 4, "dtype": "bfloat16"}
            | {"residual": True}
        ),
        Example(
            {"m": 16, "n": 8192, "k": 1024, "world_size": 8, "residual": True, "rms_norm": True}
        ),
        Example({"m": 4096, "n": 8192, "k": 3584, "world_size": 8, "dtype": "bfloat16"}),
        Example({"m": 128, "n": 4096, "k": 2048, "world_size": 8, "weight_layout": "kn"}),
        Example({"m": 77, "n": 1001, "k": 129, "world_size": 8, "bias": True}, aligned=False),
    ),
    "matmul_reduce_scatter": (
        Example({"m": 64, "n": 8192, "k": 3584, "world_size": 8}),
        Example({"m": 4096, "n": 4096, "k": 3584, "world_size": 8, "dtype": "bfloat16"}),
        Example({"m": 1024, "n": 4096, "k": 2048, "world_size": 4, "scatter_dim": 1}),
        Example({"m": 77, "n": 1001, "k": 129, "world_size": 8}, aligned=False),
    ),
    "flash_decode": (
        Example(_GROUPED | {"batch": 1, "kv_len_per_rank": 1 << 15}),
        Example(_GROUPED | {"batch": 8, "kv_len_per_rank": 1 << 13, "page_size": 1}),
        Example(_GROUPED | {"batch": 2, "kv_len_per_rank": 1 << 13, "page_size": 64}),
        Example(
            {"batch": 4, "q_heads": 16, "kv_heads": 16, "head_dim": 256, "world_size": 4}
            | {"kv_len_per_rank": 5000, "soft_cap": True, "window": 4096, "dtype": "bfloat16"}
        ),
        Example(
            {"batch": 2, "q_heads": 64, "kv_heads": 1, "head_dim": 192, "v_head_dim": 128}
            | {"kv_len_per_rank": 1 << 14, "world_size": 8}
        ),
        Example(
            {"batch": 3, "q_heads": 10, "kv_heads": 2, "head_dim": 70, "world_size": 2}
            | {"kv_len_per_rank": 999, "page_size": 5},
            aligned=False,
        ),
    ),
}

_SMALL = {"n": 16, "k": 32, "world_size": 2}

#: operation -> problems for which compilers specialise arguments to the constant 1. They must
#: compile, and be correct.
SMALLEST: dict[str, tuple[Example, ...]] = {
    "all_gather_matmul": (Example({"m": 1, **_SMALL}, aligned=False),),
    "matmul_all_reduce": (
        Example({"m": 1, **_SMALL}, aligned=False),
        Example({"m": 1, **_SMALL, "rms_norm": True}, aligned=False),
    ),
    "matmul_reduce_scatter": (Example({"m": 2, **_SMALL}, aligned=False),),
    "flash_decode": (
        Example(
            {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 16, "world_size": 2}
            | {"kv_len_per_rank": 1},
            aligned=False,
        ),
    ),
}


@dataclass(frozen=True)
class Case:
    """One candidate to compile for one device.

    Args:
        is_default: the config is the one of an untuned problem: it must not spill.
    """

    op: str
    problem: Any
    variant: str
    config: Config
    device: str
    aligned: bool
    is_default: bool

    @property
    def hardware(self) -> Hardware:
        return KNOWN[self.device]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"config": dict(self.config)}


def cases(
    op: str, device: str, corners: bool = False, examples: int | None = None
) -> Iterator[Case]:
    """The cases of an operation on a device, for every variant.

    Args:
        corners: not only default configs, also the further first ones and the ends of all
            meta-parameters.
        examples: only so many of the operation's examples.

    Raises:
        KeyError: the operation has no examples here yet.
    """
    for example in EXAMPLES[op][:examples]:
        yield from _cases_of(example, op, device, corners)


def smallest_cases(op: str, device: str) -> Iterator[Case]:
    """The default configs of every variant for an operation's smallest problems, on a device."""
    for example in SMALLEST[op]:
        yield from _cases_of(example, op, device, corners=False)


def _cases_of(example: Example, op: str, device: str, corners: bool) -> Iterator[Case]:
    hardware, problem = KNOWN[device], registry.problem_class(op)(**example.fields)
    for name, variant in registry.variants(op).items():
        if variant.unsupported_reason(problem, hardware):
            continue
        default = variant.seed_configs(problem, hardware)[0]
        configs = [default, *(_others(variant, problem, hardware) if corners else ())]
        for config in configs:
            is_default = config is default
            yield Case(op, problem, name, config, device, example.aligned, is_default)


def _others(variant: Variant, problem: Any, hardware: Hardware) -> list[Config]:
    """Further seed configs, and the default with two meta-parameters at an end of their ranges."""

    def is_refused(config: Config) -> bool:
        return variant.prune_reason(problem, hardware, config) is not None

    default, *others = variant.seed_configs(problem, hardware)
    found: list[Config] = list(others)
    for end in (0, -1):
        ends = {knob: values[end] for knob, values in variant.space(problem, hardware).items()}
        moved = [(knob, value) for knob, value in ends.items() if value != default[knob]]
        for pair in (moved[start : start + 2] for start in range(0, len(moved), 2)):
            together = {**default, **dict(pair)}
            alone = [{**default, knob: value} for knob, value in pair]
            found += alone if is_refused(together) else [together]
    distinct = [one for at, one in enumerate(found) if one not in (default, *found[:at])]
    return [one for one in distinct if not is_refused(one)]
