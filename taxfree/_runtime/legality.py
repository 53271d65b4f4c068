"""Whether a config runs on a problem today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from taxfree.problems import LARGEST, recorded_problem, with_fields
from taxfree_kernels.decode_step.tuned import STEP, VERSIONS, WAYS, StepProblem
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import Problem, Variant, operation_names, unsupported_reason, variants
from taxfree_tuning_db import Record
from taxfree_tuning_db.records import canonical_json

#: how far beyond its largest value a parameter may be, whose space has lost values since
_LOST = 4


class VariantConfig(Protocol):
    """A variant and its config, however they are known."""

    @property
    def variant(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...


def transferred_illegal_reason(
    op: str, problem: Problem, measured: VariantConfig, hardware: Hardware
) -> str | None:
    """Why a config that was measured on another problem does not serve this one, or None."""
    variant = variants(op)[measured.variant]
    if unsupported_reason(variant, problem, hardware) is None:
        space = variant.space(problem, hardware)
        for parameter, value in measured.config.items():
            if value not in space.get(parameter, ()):
                why = "is not in the space of this problem"
                return f"{measured.variant}: {parameter}={value} {why}"
    return candidate_illegal_reason(op, problem, measured, hardware)


def candidate_illegal_reason(
    op: str, problem: Problem, measured: VariantConfig, hardware: Hardware
) -> str | None:
    """Why a measured config does not run today, or None."""
    variant, config = variants(op)[measured.variant], measured.config
    reason = unsupported_reason(variant, problem, hardware)
    if reason is None:  # else there may be no space
        reason = _out_of_bounds(variant.space(problem, hardware), config)
        reason = reason or illegal_reason(variant, problem, hardware, config)
    return None if reason is None else f"{measured.variant}: {reason}"


def illegal_reason(
    variant: Variant, problem: Problem, hardware: Hardware, config: Mapping[str, Any]
) -> str | None:
    """Why a variant refuses a problem or a config today, or None."""
    reason = unsupported_reason(variant, problem, hardware)
    try:
        return reason or variant.illegal_reason(problem, hardware, config)
    except KeyError as parameter:  # an imported record may hold anything
        return f"the config has no {parameter}"


def refusal(record: Record) -> str | None:
    """Why a record of the right form cannot be one of today's operations, or None."""
    known: Mapping[str, Variant | None]
    if record.op == STEP:
        known = {name: WAYS.get(name) for name in VERSIONS}
        problem = with_fields(StepProblem, record.problem)
    elif record.op in operation_names():
        known = variants(record.op)
        problem = recorded_problem(record.op, record.problem)
    else:
        return f"there is no operation {record.op!r}"
    sizes = [value for value in record.problem.values() if isinstance(value, int)]
    if problem is None or max(sizes) > LARGEST:
        return f"{record.op} has no problem {canonical_json(record.problem)}"
    hardware = next((known for known in KNOWN.values() if known.name == record.hardware.gpu), None)
    for measured in (record.winner, record.baseline, *record.runners_up):
        if measured.variant not in known:
            return f"{record.op} has no variant {measured.variant!r}"
        variant = known[measured.variant]
        if variant is None or hardware is None or unsupported_reason(variant, problem, hardware):
            continue  # whoever looks it up checks it for the device there
        space = variant.space(problem, hardware)
        unknown = sorted(measured.config.keys() - space.keys())
        reason = _out_of_bounds(space, measured.config)
        if unknown or reason:
            return f"{measured.variant}: {reason or f'there is no parameter {unknown[0]!r}'}"
    return None


def _out_of_bounds(space: Mapping[str, tuple[Any, ...]], config: Mapping[str, Any]) -> str | None:
    """Which value of a config no space like this one ever had, or None."""
    for name, value in config.items():
        choices = space.get(name, (value,))
        is_of_type = any(type(value) is type(choice) for choice in choices)
        numbers = [choice for choice in choices if type(choice) is int] or [-1]
        is_near = type(value) is int and min(1, *numbers) <= value <= _LOST * max(numbers)
        if not (is_of_type and (value in choices or is_near)):
            return f"{name}={value!r} is beyond its values, {', '.join(map(str, choices))}"
    return None
