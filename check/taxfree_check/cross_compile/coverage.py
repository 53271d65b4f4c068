"""The problems and configs that the assembly checks compile, one for each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from taxfree_kernels import variant as registry
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import Config, Problem, Variant

#: one device per architecture.
DEVICES = ("h200", "mi300x", "mi350x")


@dataclass(frozen=True)
class Case:
    """One candidate to compile for one device.

    Args:
        aligned: all rows start at multiples of 16 bytes, so that accesses can be wide.
        is_default: the config is the one of an untuned problem: it must not spill.
    """

    op: str
    problem: Problem
    variant: str
    config: Config
    device: str
    aligned: bool
    is_default: bool

    @property
    def hardware(self) -> Hardware:
        return KNOWN[self.device]


def cases(
    op: str, device: str, corners: bool = False, examples: int | None = None
) -> Iterator[Case]:
    """The cases of an operation on a device, for every variant.

    Args:
        corners: not only default configs, also the further first ones and the ends of all
            meta-parameters.
        examples: only so many of the operation's problems to compile.
    """
    shapes = registry.operation_shapes(op)
    for index, problem in enumerate((*shapes.aligned, *shapes.ragged)[:examples]):
        yield from _cases_of(problem, index < len(shapes.aligned), device, corners)


def smallest_cases(op: str, device: str) -> Iterator[Case]:
    """The default configs of every variant for an operation's smallest problems, on a device."""
    for problem in registry.operation_shapes(op).smallest:
        yield from _cases_of(problem, False, device, corners=False)


def _cases_of(problem: Problem, aligned: bool, device: str, corners: bool) -> Iterator[Case]:
    hardware, op = KNOWN[device], registry.op_of(problem)
    for name, variant in registry.variants(op).items():
        if variant.unsupported_reason(problem, hardware):
            continue
        default = variant.seed_configs(problem, hardware)[0]
        configs = [default, *(other_configs(variant, problem, hardware) if corners else ())]
        for config in configs:
            is_default = config is default
            yield Case(op, problem, name, config, device, aligned, is_default)


def other_configs(variant: Variant, problem: Problem, hardware: Hardware) -> list[Config]:
    """Further seed configs, and the default with two meta-parameters at an end of their ranges."""

    def is_illegal(config: Config) -> bool:
        return variant.illegal_reason(problem, hardware, config) is not None

    default, *others = variant.seed_configs(problem, hardware)
    configs: list[Config] = list(others)
    for end in (0, -1):
        ends = {name: values[end] for name, values in variant.space(problem, hardware).items()}
        moved = [(name, value) for name, value in ends.items() if value != default[name]]
        for pair in (moved[start : start + 2] for start in range(0, len(moved), 2)):
            together = {**default, **dict(pair)}
            alone = [{**default, name: value} for name, value in pair]
            configs += alone if is_illegal(together) else [together]
    distinct = [one for index, one in enumerate(configs) if one not in (default, *configs[:index])]
    return [one for one in distinct if not is_illegal(one)]
