"""The twin of the persistent step on real ranks: tokens, bits, and peers that never come."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import Ranks


def steps(fabric: Any, batch: int, dtype: str) -> list[str]:
    """Complaints of calls one after another, twice from the same cache."""
    import torch

    from benchmarks.decode_step import reference
    from taxfree_check.checker import steps
    from taxfree_kernels.decode_step.twin import TwinStep

    problem = steps.StepProblem(fabric.world_size, batch, has_same_head=True, has_all=True)
    model, of = steps.model(problem), getattr(torch, dtype)
    parts = [steps.cast(each, of) for each in model.parts]
    held, found, complaints = [], [], []
    for _ in range(2):
        caches = [steps.cast(steps.cache(problem, rank, 1), of) for rank in range(len(parts))]
        step = TwinStep(
            parts[fabric.rank], caches[fabric.rank], batch, fabric, {"DOWN_PARTS": 2, "SPLITS": 2}
        )
        of_ranks = list(zip(parts, caches, strict=True))
        exact, _ = reference(of_ranks, model.tokens[0], model.positions[0])
        tokens = step(model.tokens[0], model.positions[0])
        own = exact.chunk(fabric.world_size, 1)[0]  # all ranks have the same head
        error = float((step.logits - own).norm() / own.norm())
        if not error < (1e-5 if of == torch.float32 else 3e-2):
            complaints.append(f"logits off by {error:.3g}")
        if not torch.equal(tokens, step.logits.argmax(1)):
            complaints.append(f"tokens {tokens.tolist()}")
        held.append(step)
        found.append(step.logits.clone())
    if not torch.equal(*found):
        complaints.append("other bits in a repeat")
    everyone = [torch.empty_like(found[0]) for _ in parts]
    torch.distributed.all_gather(everyone, found[0], group=fabric.group)
    if not all(torch.equal(each, found[0]) for each in everyone):
        complaints.append("other bits on another rank")
    return complaints


def lost_peer(fabric: Any) -> list[Any]:
    """Rank 0 calls alone; then all do, behind a reset."""
    from taxfree_check.checker import steps
    from taxfree_kernels.decode_step.twin import TwinStep
    from taxfree_kernels.errors import PeerTimeout

    problem = steps.StepProblem(fabric.world_size)
    model = steps.model(problem)
    step = TwinStep(model.parts[fabric.rank], steps.cache(problem, fabric.rank, 1), 1, fabric)
    call = (model.tokens[0], model.positions[0])
    fabric.pool.bound_waits(0.5)
    found: list[Any] = []
    if fabric.rank == 0:
        found.append(step(*call).tolist())
        try:
            step(*call)
        except PeerTimeout as error:
            found.append("waited" in str(error))
    fabric.pool.bound_waits(30.0)
    return [*found, step(*call).tolist()]


@pytest.mark.parametrize(
    ("world_size", "batch", "dtype"), [(1, 1, "float16"), (2, 2, "float32"), (3, 1, "bfloat16")]
)
def test_logits_are_right_and_bits_repeat(
    ranks: Ranks, world_size: int, batch: int, dtype: str
) -> None:
    found = ranks.run(world_size, f"{__name__}:steps", batch=batch, dtype=dtype)
    assert found == [[]] * world_size


def test_a_lost_peer_ends_waits_and_a_reset_helps(ranks: Ranks) -> None:
    (alone, timed_out, token), (other,) = ranks.run(2, f"{__name__}:lost_peer")
    assert (alone, timed_out) == ([-1], True)
    assert token == other
