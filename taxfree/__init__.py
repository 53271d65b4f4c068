"""Fused multi-GPU kernels, chosen per shape by measurements on this kind of hardware.

    import taxfree

    rt = taxfree.init()                       # on torch.distributed's default group
    y = rt.all_gather_matmul(a_shard, weight)

Names are imported when they are first used, so that the command line's help loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from taxfree._version import __version__

if TYPE_CHECKING:
    from taxfree._runtime.autotune import autotune as autotune
    from taxfree._runtime.autotuning import Autotuned as Autotuned
    from taxfree._runtime.dispatch import Choice as Choice
    from taxfree._runtime.runtime import Memory as Memory
    from taxfree._runtime.runtime import Runtime as Runtime
    from taxfree._runtime.startup import init as init
    from taxfree.errors import NoRecord as NoRecord
    from taxfree.errors import TaxfreeError as TaxfreeError
    from taxfree.errors import UsageError as UsageError
    from taxfree.models.decode import ModelStep as ModelStep
    from taxfree.models.decode import decode_step as decode_step
    from taxfree.models.parallel import enable as enable
    from taxfree.models.report import Report as Report
    from taxfree.models.report import count_calls as count_calls
    from taxfree.models.report import report as report
    from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul as AllGatherMatmul
    from taxfree_kernels.attention.problem import Attention as Attention
    from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll as EmbeddingAllToAll
    from taxfree_kernels.errors import FabricUnavailable as FabricUnavailable
    from taxfree_kernels.errors import PeerTimeout as PeerTimeout
    from taxfree_kernels.flash_decode.problem import FlashDecode as FlashDecode
    from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce as MatmulAllReduce
    from taxfree_kernels.matmul_reduce_scatter.problem import (
        MatmulReduceScatter as MatmulReduceScatter,
    )
    from taxfree_kernels.quantise import quantise as quantise
    from taxfree_kernels.quantise import silu_and_mul_quantise as silu_and_mul_quantise
    from taxfree_kernels.stencil.problem import Stencil as Stencil
    from taxfree_kernels.variant import SizeRange as SizeRange

_MODULES = {
    "taxfree._runtime.autotune": "autotune",
    "taxfree._runtime.autotuning": "Autotuned",
    "taxfree._runtime.dispatch": "Choice",
    "taxfree._runtime.runtime": "Memory Runtime",
    "taxfree._runtime.startup": "init",
    "taxfree.errors": "NoRecord TaxfreeError UsageError",
    "taxfree.models.decode": "ModelStep decode_step",
    "taxfree.models.parallel": "enable",
    "taxfree.models.report": "Report count_calls report",
    "taxfree_kernels.all_gather_matmul.problem": "AllGatherMatmul",
    "taxfree_kernels.attention.problem": "Attention",
    "taxfree_kernels.embedding_all_to_all.problem": "EmbeddingAllToAll",
    "taxfree_kernels.errors": "FabricUnavailable PeerTimeout",
    "taxfree_kernels.flash_decode.problem": "FlashDecode",
    "taxfree_kernels.matmul_all_reduce.problem": "MatmulAllReduce",
    "taxfree_kernels.matmul_reduce_scatter.problem": "MatmulReduceScatter",
    "taxfree_kernels.quantise": "quantise silu_and_mul_quantise",
    "taxfree_kernels.stencil.problem": "Stencil",
    "taxfree_kernels.variant": "SizeRange",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'taxfree' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("torch", "triton"):
            error.add_note("pip install 'taxfree[cuda]' or 'taxfree[cpu]'; for AMD, a ROCm build")
        raise


def __dir__() -> list[str]:
    return __all__
