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
    from taxfree._runtime.autotune import autotune
    from taxfree._runtime.autotuning import Autotuned
    from taxfree._runtime.dispatch import Choice
    from taxfree._runtime.runtime import Memory, Runtime
    from taxfree._runtime.startup import init
    from taxfree.errors import NoRecord, TaxfreeError, UsageError
    from taxfree.models.decode import ModelStep, decode_step
    from taxfree.models.parallel import enable
    from taxfree.models.report import Report, count_calls, report
    from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
    from taxfree_kernels.attention.problem import Attention
    from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
    from taxfree_kernels.errors import FabricUnavailable, PeerTimeout
    from taxfree_kernels.flash_decode.problem import FlashDecode
    from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
    from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
    from taxfree_kernels.quantise import quantise, silu_and_mul_quantise
    from taxfree_kernels.stencil.problem import Stencil
    from taxfree_kernels.variant import SizeRange

_HOMES = {
    "AllGatherMatmul": "taxfree_kernels.all_gather_matmul.problem",
    "Autotuned": "taxfree._runtime.autotuning",
    "Choice": "taxfree._runtime.dispatch",
    "FabricUnavailable": "taxfree_kernels.errors",
    "MatmulAllReduce": "taxfree_kernels.matmul_all_reduce.problem",
    "MatmulReduceScatter": "taxfree_kernels.matmul_reduce_scatter.problem",
    "Attention": "taxfree_kernels.attention.problem",
    "EmbeddingAllToAll": "taxfree_kernels.embedding_all_to_all.problem",
    "FlashDecode": "taxfree_kernels.flash_decode.problem",
    "Memory": "taxfree._runtime.runtime",
    "ModelStep": "taxfree.models.decode",
    "NoRecord": "taxfree.errors",
    "PeerTimeout": "taxfree_kernels.errors",
    "Report": "taxfree.models.report",
    "Runtime": "taxfree._runtime.runtime",
    "SizeRange": "taxfree_kernels.variant",
    "Stencil": "taxfree_kernels.stencil.problem",
    "TaxfreeError": "taxfree.errors",
    "UsageError": "taxfree.errors",
    "autotune": "taxfree._runtime.autotune",
    "count_calls": "taxfree.models.report",
    "decode_step": "taxfree.models.decode",
    "enable": "taxfree.models.parallel",
    "init": "taxfree._runtime.startup",
    "quantise": "taxfree_kernels.quantise",
    "report": "taxfree.models.report",
    "silu_and_mul_quantise": "taxfree_kernels.quantise",
}

__all__ = [
    "AllGatherMatmul",
    "Attention",
    "Autotuned",
    "Choice",
    "EmbeddingAllToAll",
    "FabricUnavailable",
    "FlashDecode",
    "MatmulAllReduce",
    "MatmulReduceScatter",
    "Memory",
    "ModelStep",
    "NoRecord",
    "PeerTimeout",
    "Report",
    "Runtime",
    "SizeRange",
    "Stencil",
    "TaxfreeError",
    "UsageError",
    "__version__",
    "autotune",
    "count_calls",
    "decode_step",
    "enable",
    "init",
    "quantise",
    "report",
    "silu_and_mul_quantise",
]


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
