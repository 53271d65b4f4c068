"""What is tuned of a decode step: its problem, the key of records, and the ways to compute it.

A step is no operation: its inputs are a model, and the rival of its kernel is a sequence of
operations, which the dispatcher chooses in a ring above. So no folder's scan finds it. Its ways are
variants to the search and to records alone; ``taxfree.decode_step`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import DTYPES, ITEM_BYTES, Config, Cost, Plan, Problem, Space, Variant

STEP = "decode_step"
#: in which a record may differ and still serve; sums of octaves are bounded, as of operations
INTERPOLATED = ("batch", "context", "layers")
IGNORED = ("dtype", "vocabulary")


@dataclass(frozen=True)
class StepProblem(Problem):
    """A step of a model, whose sizes are those of a rank's part but for the vocabulary.

    Args:
        batch: sequences.
        context: tokens of a sequence that the cache has room for, up to a power of two.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary: of the model.
        dtype: "float16" or "bfloat16".
        world_size: ranks.
        x_dtype, scales: of layers' weights, as of ``MatmulProblem``; scales are of "channel" or
            "block".

    Raises:
        PlanError: on impossible dimensions.
    """

    batch: int
    context: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: str = "bfloat16"
    world_size: int = 1
    x_dtype: str = "same"
    scales: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", 1 << (self.context - 1).bit_length())
        sizes = [value for value in vars(self).values() if isinstance(value, int)]
        if min(sizes) < 1 or self.dtype not in DTYPES:
            raise PlanError(f"{self}: sizes are at least 1, dtypes {', '.join(DTYPES)}")
        if (self.x_dtype, self.scales) not in (
            ("same", "none"), ("fp8", "channel"), ("fp8", "block"),
        ):  # fmt: skip
            raise PlanError(f"{self}: scales are of channel or block in fp8, else none")

    @property
    def weights(self) -> int:
        """Elements of the rank's weights that a step reads."""
        return self._of_layers + self.hidden * -(-self.vocabulary // self.world_size)

    @property
    def _of_layers(self) -> int:
        rows = (2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * self.intermediate
        return self.hidden * self.layers * rows

    @property
    def cost(self) -> Cost:
        """Of the slowest rank; the cache counts as full."""
        cached = 2 * self.layers * self.batch * self.context * self.kv_heads * self.head_dim
        words = 4 * 2 * self.layers * self.batch * self.hidden
        return Cost(
            flops=2 * self.batch * self.weights,
            memory_bytes=ITEM_BYTES[self.dtype] * (self.weights + cached)
            - (self.x_dtype == "fp8") * self._of_layers,
            link_bytes=(self.world_size - 1) * words,
        )

    @property
    def slot_bytes(self) -> int:
        """Symmetric memory that the sums of the operations need in a payload slot."""
        return 8 * (self.world_size + 1) * self.batch * self.hidden


class _Way(Variant):
    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        raise PlanError("a decode step has no plan", "taxfree.decode_step makes it")


class OneKernel(_Way):
    """The persistent kernel; interpreted, its twin."""

    name = "kernel"
    version = 3  # since 2: attention by matrix instructions, in half of the code

    def unsupported_reason(self, problem: Any, hardware: Hardware) -> str | None:
        if hardware.architecture not in ("sm_90", "cpu"):
            return f"the kernel is not written for {hardware.architecture}"
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        """Parameters of ``tape.Model``."""
        if hardware.backend == "interpreter":
            return {"SPLITS": (1, 2), "DOWN_PARTS": (1, 2)}
        from taxfree_kernels.decode_step.step import seed_config  # needs a Triton with Gluon
        from taxfree_kernels.decode_step.sums import most_parts
        from taxfree_kernels.decode_step.tape import Model

        known = {
            "HIDDEN": problem.hidden, "HEADS": problem.heads, "KV_HEADS": problem.kv_heads,
            "HEAD_DIM": problem.head_dim, "INTERMEDIATE": problem.intermediate,
            "BATCH": problem.batch, "SCALES": problem.scales,
        }  # fmt: skip
        model = Model(**dict.fromkeys(Model._fields, 0) | known)
        seed = seed_config(model, hardware.shared_memory, problem.world_size)
        stages, parts = seed["STAGES"], seed["DOWN_PARTS"]
        others = {
            "STAGES": (stages - 2, stages - 4),
            "LIMIT": (2, 3, 4),
            "SPLITS": (1, 2),
            "DOWN_PARTS": tuple(
                each
                for each in (parts - 1, parts + 1, 2 * parts + 1)
                if 0 < each <= most_parts(model, problem.world_size)
            ),
        }
        return {name: tuple(dict.fromkeys((first, *others[name]))) for name, first in seed.items()}

    def illegal_reason(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        limit, stages = config.get("LIMIT", 0), config.get("STAGES", 1 << 30)
        if limit >= stages:
            return f"{limit} chunks on their way, {stages} stages"
        return None


class Operations(_Way):
    """One operation after another, as the dispatcher chooses each."""

    name = "operations"


#: way -> how records version it; the library's compiled graph is what both are compared with
WAYS: Mapping[str, Variant] = {"kernel": OneKernel(), "operations": Operations()}
VERSIONS = {"baseline": 1, **{name: way.version for name, way in WAYS.items()}}
