"""Versions loaded and installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import types
from collections.abc import Mapping
from typing import Any

from taxfree._version import __version__
from taxfree.errors import one_line
from taxfree_tune.doctor.report import Guard, IrisReport, Package, Software

_PACKAGES = ("torch", "triton", "numpy", "optuna", "sqlitedict")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def look(guard: Guard) -> Software:
    """Find versions; imports what it reports."""
    distributions: Mapping[str, list[str]] = guard(
        "installed packages", importlib.metadata.packages_distributions, {}
    )
    packages = tuple(_package(guard, name, distributions.get(name, [])) for name in _PACKAGES)
    libraries: dict[str, str] = guard("torch's libraries", _of_torch, {})
    versions = {"taxfree": __version__, "python": platform.python_version()}
    return Software(versions | libraries, packages, _iris())


def _package(guard: Guard, name: str, distributions: list[str]) -> Package:
    module = guard(f"import {name}", lambda: importlib.import_module(name), None)
    installed = tuple(
        f"{distribution} {importlib.metadata.version(distribution)}"
        for distribution in set(distributions)
    )
    loaded = None if module is None else str(getattr(module, "__version__", "unknown"))
    return Package(name, loaded, tuple(sorted(installed)))


def _of_torch() -> dict[str, str]:
    """Versions that torch was built with, and of the collective libraries that it loads."""
    import torch
    import torch.distributed as dist

    versions = {}
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    if torch.version.hip is not None:
        versions["ROCm"] = torch.version.hip
    if dist.is_available() and dist.is_nccl_available():
        versions["NCCL"] = _nccl(torch)
    if dist.is_available() and dist.is_gloo_available():
        versions["gloo"] = "with torch"
    return versions


def _nccl(torch: Any) -> str:
    loaded = ".".join(map(str, torch.cuda.nccl.version()))
    installed = [
        f"{distribution.metadata['Name']} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"] in _NCCL
    ]
    return f"{loaded} ({', '.join(installed)})" if installed else loaded


def _iris() -> IrisReport:
    try:
        module = importlib.import_module("iris")
    except ModuleNotFoundError as error:
        if error.name == "iris":
            return IrisReport("missing", "not installed")
        return IrisReport("broken", one_line(error))
    except Exception as error:  # it loads the HIP runtime: OSError where there is none
        return IrisReport("broken", one_line(error))
    if not _is_rocms(module):
        return IrisReport("namesake", "another package called iris, not ROCm's")
    return IrisReport("present", str(getattr(module, "__version__", "version unknown")))


def _is_rocms(module: types.ModuleType) -> bool:
    context = getattr(module, "Iris", None)
    return callable(getattr(module, "iris", None)) and hasattr(context, "get_heap_bases")
