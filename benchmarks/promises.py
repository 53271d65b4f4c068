"""Configs that use a caller's promise of static weights, or of a static cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def promises(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """With which promise a config is worth a trial: False; and True if its plan then differs.

    The promises are those of :func:`taxfree.init`.
    """
    loads_early = config.get("PREFETCH_WEIGHT") or (config.get("BY_WARP") and config["CHAINED"])
    return (False, True) if loads_early else (False,)
