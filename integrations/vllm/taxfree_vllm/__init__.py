"""A plugin of vLLM: with ``TAXFREE_VLLM=1`` its row-parallel layers run on taxfree."""

from __future__ import annotations

import os


def register() -> None:
    """Take the place of ``RowParallelLinear``; vLLM calls this in each of its processes."""
    if os.environ.get("TAXFREE_VLLM") == "1":
        import taxfree_vllm.row_parallel  # registers the layer  # noqa: F401


def report(worker: object = None) -> str:
    """This process's layers; ``llm.collective_rpc(taxfree_vllm.report)`` asks all workers."""
    import taxfree

    return str(taxfree.report())
