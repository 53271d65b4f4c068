"""Environment variables for users: all are described here; the tuning database reads its own."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from taxfree.errors import UsageError

DEFAULT_TIMEOUT_S = 30.0

VARIABLES: Mapping[str, str] = {
    "TAXFREE_DB": "path of the tuning database; default: in the platform's user data folder",
    "TAXFREE_DISABLE": "1: every dispatch is the library",
    "TAXFREE_STRICT": "1: a problem without a record of its own is an error",
    "TAXFREE_VERIFY": "0: a winner that another device lent runs without being timed here first",
    "TAXFREE_LOG": "a YAML file that collects problems without a record, for `tune --from`",
    "TAXFREE_AUTOTUNE": "time such as 60s: what is planned without a record is tuned before",
    "TAXFREE_TIMEOUT": f"seconds a rank waits for a peer; default: {DEFAULT_TIMEOUT_S:g}",
    "TAXFREE_NODE": "name of this rank's node, where ranks of one machine are to be several nodes",
    "TAXFREE_DEBUG": "1: errors show a traceback",
}
"""Name -> one line of help."""

#: of the plugin of vLLM, of instrumented kernels, and of tests
_OTHERS = ("TAXFREE_VLLM", "TAXFREE_TIMELINE", "TAXFREE_INSTRUMENT_RECORD")
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")
_LONGEST_S = 366 * 86400.0  # clocks of waits count in 64 bits
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Settings:
    """Settings from environment variables.

    Args:
        disable: dispatch nothing but the baseline.
        strict: raise where a problem has no record of its own.
        timeout_s: seconds a rank waits for a peer.
        log: where problems that ran without a record of their own are collected, if anywhere.
        autotune_s: seconds for tuning problems when they are planned; None for no tuning.
        debug: show tracebacks.
        verify: time a winner that another device lent beside the library before it runs.
    """

    disable: bool = False
    strict: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    log: Path | None = None
    autotune_s: float | None = None
    debug: bool = False
    verify: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            UsageError: one of them is invalid; the message names it.
        """
        return cls(
            disable=_switch(environ, "TAXFREE_DISABLE"),
            strict=_switch(environ, "TAXFREE_STRICT"),
            timeout_s=_seconds(environ, "TAXFREE_TIMEOUT", DEFAULT_TIMEOUT_S),
            log=_path(environ, "TAXFREE_LOG"),
            autotune_s=_duration(environ, "TAXFREE_AUTOTUNE"),
            debug=_switch(environ, "TAXFREE_DEBUG"),
            verify=_switch(environ, "TAXFREE_VERIFY", default="1"),
        )

    def steering(self) -> dict[str, Any]:
        """The settings that affect dispatch or what is collective, on which all ranks must agree.

        The path of the database is not among them: only rank 0 reads the table. Neither is the
        timeout: it bounds each rank's own waits.
        """
        return {
            "TAXFREE_DISABLE": self.disable,
            "TAXFREE_STRICT": self.strict,
            "TAXFREE_VERIFY": self.verify,
            "TAXFREE_AUTOTUNE": self.autotune_s,
        }


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like taxfree's and are not, each with the one it resembles or empty."""
    return {
        name: next(iter(difflib.get_close_matches(name, VARIABLES, n=1)), "")
        for name in environ
        if name.startswith("TAXFREE_") and name not in (*VARIABLES, *_OTHERS)
    }


def duration(name: str, text: str) -> float:
    """The seconds that a text such as 90s, 10m or 1h stands for.

    Args:
        name: of what was given, for the error.

    Raises:
        UsageError: it stands for none, or for no time at all.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"invalid {name} {text!r}", "give a duration such as 90s, 10m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0; `True` is no number."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _switch(environ: Mapping[str, str], name: str, default: str = "") -> bool:
    text = environ.get(name, "").strip().lower() or default
    if text not in _ON + _OFF:
        raise UsageError(f"{name}={text} is neither on nor off", f"set {name}=1 or {name}=0")
    return text in _ON


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name, "").strip()
    if text and not text.endswith((".yaml", ".yml")):
        raise UsageError(f"{name}={text} is no YAML file", f"for example {name}=problems.yaml")
    return Path(text).expanduser() if text else None


def _duration(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "").strip()
    return duration(name, text) if text else None


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(
            f"{name}={text} is not a positive number of seconds, of a year at most",
            f"for example {name}=30",
        )
    return seconds
