"""Times a model of Llama's shape end to end: on taxfree, and by PyTorch's own tensor parallelism.

    python -m benchmarks.model --gpus 8 --model config.json --prompts 1024,4096 --batches 1,16,64

The sizes are those of a Hugging Face config; weights are random. Prefill is one prompt, decode one
token of each sequence. All paths run in one group of ranks on the same weights: PyTorch's, eager,
compiled, and with its micro-pipeline pass over symmetric memory; taxfree's, eager and compiled.
Logits are compared with the same model in float64, greedy tokens with its tokens. On the host, and
where ranks share GPUs, that is all: nothing is timed, and the model in one process is the
reference. The record is written to ``benchmarks/results/model``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import model_ranks
from benchmarks.commands import exit_code, keep, parser, positive, positives, record_of
from benchmarks.llama import Sizes
from benchmarks.model_ranks import PATHS, PathResult, Phase
from taxfree.errors import UsageError, WrongResult
from taxfree.settings import Settings
from taxfree.shapes.models import dtype_of, load_model, read_config
from taxfree_kernels.fabric.gpu import SHARING
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_tune import devices
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import WorkerGroup
from taxfree_tuning_db import default_path

FOLDER = Path(__file__).parent / "results" / "model"
DEADLINE_S = 1800.0


def sizes_of(path: Path, layers: int | None, world_size: int) -> tuple[Sizes, str]:
    """The sizes and the dtype of a config, with fewer layers if that is asked for.

    Raises:
        UsageError: it cannot be read, or does not split over so many ranks.
    """
    config = read_config(path)
    model = load_model(path)
    if model.experts or model.latent_dim:
        raise UsageError(f"{path} describes no model of Llama's shape", "give one without experts")
    split = {"heads": model.heads, "kv_heads": model.kv_heads, "intermediate": model.mlps[0]}
    for name, count in split.items():
        if count % world_size:
            raise UsageError(
                f"{name} {count} do not divide over {world_size} ranks", "give another --gpus"
            )
    vocabulary = int(config.get("vocab_size", 32000))
    parameters = config.get("rope_parameters") or {}
    sizes = Sizes(
        hidden=model.hidden,
        head_dim=model.head_dim,
        **split,
        layers=min(layers or sys.maxsize, int(config.get("num_hidden_layers", 1))),
        vocabulary=-(-vocabulary // world_size) * world_size,
        rope_theta=float(config.get("rope_theta") or parameters.get("rope_theta", 10000.0)),
        eps=float(config.get("rms_norm_eps", 1e-5)),
    )
    return sizes, dtype_of(config) or "bfloat16"


def problems_of(sizes: Sizes, dtype: str, phases: Sequence[Phase], world_size: int) -> list[Any]:
    """The operations between ranks: eager, and as compiled code may fuse them."""
    return [
        MatmulAllReduce(m=each.tokens, n=sizes.hidden, k=k // world_size, dtype=dtype,
                        world_size=world_size, residual=is_fused, rms_norm=is_fused)
        for each in phases
        for k in (sizes.heads * sizes.head_dim, sizes.intermediate)
        for is_fused in (False, True)
    ]  # fmt: skip


def rows_of(phase: Phase, results: Sequence[PathResult]) -> Iterator[dict[str, Any]]:
    """Rows of a record for one phase, as JSON: one for each path and mode.

    Raises:
        WrongResult: a path is less exact than the first one may be.
    """
    library = results[0].relative_error
    times = [
        timing.median_us
        for each in results
        if each.path.startswith("torch")
        for timing in each.timings.values()
    ]
    for each in results:
        if not each.relative_error <= ERROR_ALLOWANCE * library:
            raise WrongResult(
                f"{each.path}, {phase}: relative error {each.relative_error:.3g}, "
                f"{ERROR_ALLOWANCE * library:.3g} is allowed",
                f"it ran {each.ran}",
            )
        row = dataclasses.asdict(each) | {"phase": dataclasses.asdict(phase)}
        del row["timings"]
        for mode, timing in each.timings.items():
            yield row | {
                "mode": mode,
                "median_us": timing.median_us,
                "iqr_us": timing.iqr_us,
                "tokens_per_s": phase.tokens * 1e6 / timing.median_us,
                "speedup": min(times) / timing.median_us,
                "samples_us": timing.samples_us,
            }
        if not each.timings:
            yield row


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    phase = Phase(**row["phase"])
    start = f"{phase.name:8}batch={phase.batch:<4} length={phase.length:<6} {row['path']:22}"
    if row["skipped"]:
        return f"{start}skipped: {row['skipped']}"
    count = sum(map(len, row["tokens"]))
    said = f"{row['same_tokens']} of {count} tokens, error {row['relative_error']:.1e}"
    if row["same_tokens"] < count:
        said += f", at most {row['largest_gap']:.1e} from a tie"
    if "mode" not in row:
        return f"{start}{said}"
    return (
        f"{start}{row['mode']:6}{row['tokens_per_s']:10.0f} tokens/s x{row['speedup']:.2f}  {said}"
    )


def _counts(text: str) -> list[int]:
    return positives(text) if text else []


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, help="ranks; all GPUs by default")
    made.add_argument("--share", action="store_true", help="ranks share the GPUs that are there")
    made.add_argument("--model", type=Path, required=True, help="a config.json, or its folder")
    made.add_argument("--layers", type=positive, help="of the model; all by default")
    made.add_argument("--prompts", type=_counts, default="1024", help="tokens; empty for none")
    made.add_argument("--batches", type=_counts, default="1,16,64", help="sequences of a decode")
    made.add_argument("--context", type=positive, default=1024, help="tokens behind a decode")
    made.add_argument("--paths", help=f"comma-separated, the reference first: {', '.join(PATHS)}")
    made.add_argument("--winner", help="a variant that wins unmeasured; nothing is timed")
    made.add_argument("--repetitions", type=positive, default=10)
    made.add_argument("--db", type=Path, help="tuning database; the user's by default")
    options = made.parse_args(arguments)
    return exit_code(lambda: _time_all(options))


def _time_all(options: argparse.Namespace) -> None:
    fabric, settings = devices.fabric_for(options.fabric), Settings.from_environment()
    gpus = devices.available_gpus()
    world_size = options.gpus or devices.world_sizes(fabric)[0]
    shared_gpus = gpus if options.share and 0 < gpus < world_size else None
    if shared_gpus is None:
        devices.require(fabric, world_size)
    is_timed = fabric != "host" and shared_gpus is None
    reference = "torch eager" if is_timed else "one process"
    paths = [path for path in PATHS if not (is_timed and path == "one process")]
    if options.paths:
        paths = options.paths.split(",")
    if paths[0] != reference or not set(paths) <= set(PATHS):
        raise UsageError(
            f"--paths {options.paths}: these are no paths, or {reference!r} is not the first",
            f"some of {', '.join(PATHS)}",
        )
    sizes, dtype = sizes_of(options.model, options.layers, world_size)
    phases = [Phase("prefill", 1, length) for length in options.prompts]
    phases += [Phase("decode", batch, options.context) for batch in options.batches]
    history = TuningHistory.read(options.db or default_path(), required=options.db is not None)
    if options.winner and is_timed:
        raise UsageError("--winner is not for timed paths", "leave it out; the table says who wins")
    wanted = problems_of(sizes, dtype, phases, world_size)
    heap_bytes = devices.heap_bytes(wanted)
    variables = {} if shared_gpus is None else {SHARING: "1"}
    with WorkerGroup(world_size, fabric, heap_bytes, settings.timeout_s, variables) as group:
        records = list(history.records)
        if options.winner:
            records = [record_of(each, options.winner, group.hardware, "eager") for each in wanted]
        results, problems = group.call(
            model_ranks.measure, DEADLINE_S, sizes=sizes, dtype=dtype, phases=phases, paths=paths,
            records=records, repetitions=options.repetitions if is_timed else 0,
        )[0]  # fmt: skip
        rows = [
            row for phase, each in zip(phases, results, strict=True) for row in rows_of(phase, each)
        ]
        for row in rows:
            print(line_of(row), flush=True)
        if not is_timed:
            print("nothing is timed: the ranks have no GPUs of their own")
        record = {
            "model": dataclasses.asdict(sizes), "dtype": dtype, "timed": is_timed,
            "problems": problems, "rows": rows,
        }  # fmt: skip
        keep(record, group, fabric, FOLDER, options.out, shared_gpus)


if __name__ == "__main__":
    sys.exit(main())
