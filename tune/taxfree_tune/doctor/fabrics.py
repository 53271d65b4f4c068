"""Which fabrics can serve, judged as a rank worker would judge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from taxfree_tune.doctor.report import Guard

#: in the order in which `auto` tries them
ORDER = ("cuda", "rocm", "host")


def reasons(guard: Guard) -> dict[str, str | None]:
    """Fabric -> why it cannot serve on this machine, or None."""
    probed: dict[str, str | None] = guard("fabrics", _probe, {})
    why = guard.problems.get("fabrics")
    return {name: probed.get(name, why) for name in ORDER}


def _probe() -> dict[str, str | None]:
    from taxfree_kernels.fabric.open import probe  # before any change of mode: defines kernels

    reasons: dict[str, str | None] = {}
    for interpret in (True, False):
        with _interpreting(interpret):
            answers = probe()
        reasons |= {name: why for name, why in answers.items() if (name == "host") == interpret}
    return reasons


@contextlib.contextmanager
def _interpreting(on: bool) -> Iterator[None]:
    """Within the context, Triton's mode is that of a worker: interpreted on the host alone."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = on
        yield
