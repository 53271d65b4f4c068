"""The tuner's static screen: refuses candidates that cannot run, or cannot be right, without a GPU.

Processes compile candidates on the CPU, into Triton's cache, where the ranks find those that pass.
The compiled code has to pass the assembly checks of synchronisation: whether it is right must not
depend on which config is tried under which compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from taxfree_check.cross_compile.pool import CompilePool
from taxfree_check.cross_compile.resources import Resources, illegal_reason
from taxfree_kernels import variant as registry
from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Problem

SPILL_LIMIT = 64  # bytes a thread; a few spills outside of loops cost nothing
NICENESS = 10  # of the processes: ranks may measure meanwhile


@dataclass(frozen=True)
class ScreenVerdict:
    """Whether a candidate is worth a GPU's time.

    Args:
        variant, config: the candidate.
        kernels: name -> resources of each kernel that one call launches; empty for library paths,
            for the interpreter, and when it is refused without compiling.
        illegal_reason: why it is not, or None.
    """

    variant: str
    config: Config
    kernels: dict[str, Resources]
    illegal_reason: str | None = None

    @property
    def seconds(self) -> float:
        """That the compiler took for all of its kernels."""
        return sum(resources.seconds for resources in self.kernels.values())


class Screen:
    """Judges candidates for one device; a context manager, because it holds processes.

    Args:
        hardware: to compile for. For the interpreter nothing is compiled, and only variants refuse
            candidates.
        workers: processes; half the cores, at most 32, by default.
        heap_bytes: of the fabric's arena; as small as the problem allows when None.
    """

    def __init__(
        self, hardware: Hardware, workers: int | None = None, heap_bytes: int | None = None
    ) -> None:
        self._hardware, self._heap_bytes = hardware, heap_bytes
        self._pool = CompilePool(workers, niceness=NICENESS)

    def verdicts(
        self, op: str, problem: Problem, candidates: Iterable[tuple[str, Config]]
    ) -> list[ScreenVerdict]:
        """A verdict for each (variant, config), in their order.

        Raises:
            PlanError: there is no such variant.
        """
        verdicts = [
            ScreenVerdict(name, config, {}, self._illegal_reason(op, problem, name, config))
            for name, config in candidates
        ]
        if self._hardware.backend == "interpreter":
            return verdicts
        answers = self._pool.answers(
            self._request(op, problem, candidate.variant, candidate.config)
            for candidate in verdicts
            if candidate.illegal_reason is None
        )
        return [
            candidate if candidate.illegal_reason else self._verdict(candidate, next(answers))
            for candidate in verdicts
        ]

    def begin(self, op: str, problem: Problem, candidates: Iterable[tuple[str, Config]]) -> None:
        """Begin to compile candidates, which no variant refuses, for verdicts that come later."""
        if self._hardware.backend != "interpreter":
            self._pool.begin(
                self._request(op, problem, name, config) for name, config in candidates
            )

    def start(self) -> None:
        """Start the processes, if any will be needed."""
        if self._hardware.backend != "interpreter":
            self._pool.start()

    def _request(self, op: str, problem: Problem, name: str, config: Config) -> dict[str, Any]:
        return request(op, problem, name, config, self._hardware, self._heap_bytes, to_run=True)

    def _illegal_reason(self, op: str, problem: Problem, name: str, config: Config) -> str | None:
        variant = registry.variants(op).get(name)
        if variant is None:
            raise PlanError(f"{op} has no variant {name!r}")
        reason = variant.unsupported_reason(problem, self._hardware)
        return reason or variant.illegal_reason(problem, self._hardware, config)

    def _verdict(self, candidate: ScreenVerdict, answer: dict[str, Any]) -> ScreenVerdict:
        if "error" in answer:
            return replace(candidate, illegal_reason=f"does not compile: {answer['error']}")
        kernels = {one["kernel"]: Resources(**one["resources"]) for one in answer["kernels"]}
        reasons = [
            illegal_reason(resources, self._hardware, SPILL_LIMIT) for resources in kernels.values()
        ]
        reasons += [
            f"compiled wrongly: {broken['check']}: {broken['message']}"
            for one in answer["kernels"]
            for broken in one["violations"]
        ]
        return replace(candidate, kernels=kernels, illegal_reason=next(filter(None, reasons), None))

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()


def request(
    op: str,
    problem: Problem,
    variant: str,
    config: Config,
    hardware: Hardware,
    heap_bytes: int | None = None,
    aligned: bool | None = None,
    to_run: bool = False,
) -> dict[str, Any]:
    """A request to a compile worker, as JSON.

    Args:
        heap_bytes: of the fabric's arena; as small as the problem allows when None.
        aligned: all rows start at multiples of 16 bytes; None leaves the checks of speed out.
        to_run: ranks of this machine will launch the kernels.
    """
    return {
        "op": op,
        "problem": asdict(problem),
        "variant": variant,
        "config": dict(config),
        "hardware": asdict(hardware),
        "heap_bytes": heap_bytes,
        "aligned": aligned,
        "to_run": to_run,
    }
