"""`taxfree bench --model`: prefill and decode of a model, by PyTorch and by taxfree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from taxfree.errors import TaxfreeError, UsageError, WrongResult
from taxfree.files import write
from taxfree.problems import quoted
from taxfree_cli.asked import announce
from taxfree_cli.options import ShapeOptions, database_path
from taxfree_cli.output import print_json, print_table, results, watched
from taxfree_tune.shapes.text import integer

if TYPE_CHECKING:
    from taxfree_tune.benching.model import PhaseResult

_PREFILL, _DECODE, _CONTEXT = "256,1024,4096", "1,16,64", 1024


@dataclass(frozen=True)
class ModelOptions:
    """The options of a whole model, as they were given; None for those that were not."""

    layers: int | None
    prefill: str | None
    decode: str | None
    context: int | None
    mode: Sequence[str] | None


def bench_model(
    name: str,
    shapes: ShapeOptions,
    options: ModelOptions,
    fabric: str,
    db: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure a model, and print each phase as soon as it is done.

    Args:
        shapes: of which the number of ranks and the dtype count.

    Raises:
        UsageError: an option or the model's config is invalid.
        WrongResult: a mode of taxfree is less exact than PyTorch's; it is shown before.
        TaxfreeError: a mode of taxfree failed; it is shown before.
    """
    from taxfree_tune import devices
    from taxfree_tune.benching.model import ModelBench, document, model_to_bench, run
    from taxfree_tune.tuning.history import TuningHistory

    fabric = devices.fabric_for(fabric)
    ranks = shapes.ranks_of_model(devices.world_sizes(fabric))
    model, dtype = model_to_bench(name, ranks, options.layers, shapes.dtype)
    bench = ModelBench(name, model, dtype, ranks, _phases(options))
    modes = dict.fromkeys(mode for _, mode in bench.modes)
    unknown = [mode for mode in options.mode or () if mode not in modes]
    if unknown:
        raise UsageError(f"there is no mode {quoted(unknown[0])}", f"one of: {', '.join(modes)}")
    if options.mode:
        bench = replace(bench, modes=[way for way in bench.modes if way[1] in options.mode])
    history = TuningHistory.read(database_path(db), required=db is not None)
    devices.require(fabric, ranks)
    if fabric == "host":
        announce(bench.problems(), "a layer several calls", "--layers 1 --prefill 16")
    measured: list[PhaseResult] = []
    for result in watched("bench", len(bench.phases), run(bench, fabric, history)):
        measured.append(result)
        saved = document(bench, fabric, measured)
        if out is not None:  # what is finished is kept, whatever ends the rest
            write(out, json.dumps(saved, indent=1, allow_nan=False) + "\n")
        if not as_json:
            print_phase(result)
    if as_json:
        print_json(saved)
    _fail_if_broken(measured)


def _phases(options: ModelOptions) -> list[Any]:
    from taxfree_tune.benching.model_tasks import Phase

    prefill, decode = options.prefill, options.decode
    if prefill is None and decode is None:
        prefill, decode = _PREFILL, _DECODE
    context = options.context or _CONTEXT
    return [
        *(Phase("prefill", 1, length) for length in _sizes("--prefill", prefill, _PREFILL)),
        *(Phase("decode", batch, context) for batch in _sizes("--decode", decode, _DECODE)),
    ]


def _sizes(option: str, text: str | None, example: str) -> list[int]:
    """The sizes of a list such as 1,16,64; none where it was not given.

    Raises:
        UsageError: it is no such list.
    """
    if text is None:
        return []
    sizes = [integer(part) or 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise UsageError(
            f"{option} {quoted(text)} is not a list of sizes", f"for example {option} {example}"
        )
    return list(dict.fromkeys(sizes))


def print_phase(result: PhaseResult) -> None:
    """Print the modes of a phase: those that were timed as a table, the others with the reason."""
    rows = []
    for outcome in result.outcomes:
        if outcome.timing is not None:
            speedup = result.speedup(outcome)
            rows.append(
                [f"{outcome.path} {outcome.mode}", outcome.timing.median_us, outcome.timing.iqr_us,
                 result.tokens_per_s(outcome), outcome.relative_error,
                 "" if speedup is None else f"{speedup:.2f}x"]
            )  # fmt: skip
    columns = ["mode", "us", "±us", "tokens/s", "error", "vs torch"]
    if result.is_interpreted:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    console = results()
    if rows:
        print_table(columns, rows, title=str(result.phase))
    else:
        console.print(str(result.phase), markup=False, highlight=False)
    for outcome in result.outcomes:
        if outcome.state == "measured" and outcome.reason:
            console.print(
                f"{outcome.path} {outcome.mode}: {outcome.reason}", markup=False, highlight=False
            )
        if outcome.state != "measured":
            state = "left out" if outcome.state == "refused" else outcome.state
            line = f"{outcome.path} {outcome.mode}: {state}: {outcome.reason}"
            console.print(Text(line, style="" if outcome.state == "refused" else "red"))
    kinds = Counter(kind for ran in result.problems.values() for kind in ran)
    if kinds:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        console.print(f"taxfree's problems: {counts}", markup=False, highlight=False)
    console.print()


def _fail_if_broken(measured: Sequence[PhaseResult]) -> None:
    for state, error in (("wrong", WrongResult), ("failed", TaxfreeError)):
        for result in measured:
            for outcome in result.outcomes:
                if (outcome.path, outcome.state) == ("taxfree", state):
                    raise error(
                        f"{outcome.path} {outcome.mode}, {result.phase}: {outcome.reason}",
                        "the other modes were measured",
                    )
