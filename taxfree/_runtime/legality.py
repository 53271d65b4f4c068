"""Whether a config runs on a problem today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, Variant, variants


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
    if variant.unsupported_reason(problem, hardware) is None:
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
    reason = illegal_reason(variants(op)[measured.variant], problem, hardware, measured.config)
    return None if reason is None else f"{measured.variant}: {reason}"


def illegal_reason(
    variant: Variant, problem: Problem, hardware: Hardware, config: Mapping[str, Any]
) -> str | None:
    """Why a variant refuses a problem or a config today, or None."""
    reason = variant.unsupported_reason(problem, hardware)
    try:
        return reason or variant.illegal_reason(problem, hardware, config)
    except KeyError as parameter:  # an imported record may hold anything
        return f"the config has no {parameter}"
