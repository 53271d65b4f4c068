"""A decode step is tuned and recorded, and the record decides what runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from taxfree._runtime.legality import refusal
from taxfree_kernels.decode_step.tuned import STEP, WAYS, StepProblem
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.tuning.steps import StepToTune, tune
from taxfree_tuning_db import Database
from taxfree_tuning_db.records import canonical_json
from tests.ranks import Ranks
from tests.tune.test_bench_model import MODEL

ASKED = StepToTune(MODEL, "bfloat16", 2, batch=1, context=5)
LLAMA = StepProblem(1, 1025, 4, 4096, 16, 4, 128, 7168, 128256, world_size=2)


def made(fabric: Any, records: list[Any]) -> list[str]:
    """What a step runs by these records, in all batches and capacities."""
    import torch

    from taxfree_tune.benching.model_tasks import Bench, Phase

    found = []
    for batch, context in ((1, 5), (2, 5), (1, 200)):
        with torch.no_grad():
            bench = Bench(fabric, MODEL, torch.bfloat16, Phase("decode", batch, context), records)
            run, logits, step = bench.step()
            run()
            assert not logits().isnan().any()
        found.append(step.ran)
    return found


@pytest.mark.timeout(600)
@pytest.mark.dealt("scales")
@pytest.mark.parametrize("scales", ["channel", "block"])
def test_a_step_in_fp8_is_tuned(ranks: Ranks, tmp_path: Path, scales: str) -> None:
    """Kernel, operations and library quantise inputs; none errs more than the library may."""
    blocks = tuple(dataclasses.replace(block, scales=scales) for block in MODEL.blocks)
    model = dataclasses.replace(MODEL, blocks=blocks)
    asked = dataclasses.replace(ASKED, model=model, batch=4)
    with Database(tmp_path / "tuning.db") as database:
        record = tune(asked, "host", database, trials=1)
    assert (record.problem["x_dtype"], record.problem["scales"]) == ("fp8", scales)
    measured = {each.variant for each in (record.winner, record.baseline, *record.runners_up)}
    assert measured == {"baseline", "kernel", "operations"}


@pytest.mark.timeout(600)
def test_a_step_is_tuned_and_its_record_is_followed(ranks: Ranks, tmp_path: Path) -> None:
    lines: list[str] = []
    with Database(tmp_path / "tuning.db") as database:
        record = tune(ASKED, "host", database, trials=2, progress=lines.append)
        (stored,) = database.records()
    assert stored == record
    assert (record.op, record.problem["context"], record.trials) == (STEP, 8, 2)
    measured = {each.variant for each in (record.winner, record.baseline, *record.runners_up)}
    assert measured == {"baseline", "kernel", "operations"}
    assert refusal(record) is None  # to import it
    other = dataclasses.replace(record, problem={**record.problem, "heads": "8"})
    assert refusal(other) == f"decode_step has no problem {canonical_json(other.problem)}"
    assert all(line.startswith("kernel SPLITS=") for line in lines)
    first = min(
        (each for each in (record.winner, *record.runners_up) if each.variant in WAYS),
        key=lambda each: each.median_us["eager"],
    )
    (own, other_batch, other_context), _ = ranks.run(2, f"{__name__}:made", records=[record])
    start = {"kernel": "one kernel: record:", "operations": "operations: record:"}
    assert own.startswith(start[first.variant])
    assert "baseline" in own
    for each in (other_batch, other_context):
        assert each.startswith("operations: the kernel is interpreted here, and no record asks")


def test_the_space_has_the_names_of_the_kernels_work() -> None:
    from taxfree_kernels.decode_step.step import seed_config
    from taxfree_kernels.decode_step.tape import Model

    def of_kernel(batch: int) -> dict[str, int]:
        sizes: dict[str, Any] = {"HIDDEN": 4096, "HEADS": 16, "KV_HEADS": 4, "HEAD_DIM": 128}
        sizes |= {"BATCH": batch}
        sizes |= {"INTERMEDIATE": 7168, "SCALES": "none"}
        known: dict[str, Any] = dict.fromkeys(Model._fields, 0) | sizes
        return seed_config(Model(**known), KNOWN["h100"].shared_memory, 2)

    for batch in (1, 16):
        problem = StepProblem(**{**vars(LLAMA), "batch": batch})
        space = WAYS["kernel"].space(problem, KNOWN["h100"])
        assert space.keys() <= set(Model._fields)
        (first,) = WAYS["kernel"].seed_configs(problem, KNOWN["h100"])
        assert first == of_kernel(batch)


def test_words_of_all_parts_fit_a_slot() -> None:
    large = {"hidden": 8192, "heads": 32, "intermediate": 14336, "batch": 16}
    space = WAYS["kernel"].space(StepProblem(**{**vars(LLAMA), **large}), KNOWN["h100"])
    assert set(space["DOWN_PARTS"]) == {1, 2}


def test_configs_with_parameters_that_are_constants_now() -> None:
    from taxfree_tuning_db.renamed import with_new_names

    def kernel(**config: int) -> dict[str, Any]:
        measured = {"variant": "kernel", "version": 1, "config": {"STAGES": 10} | config}
        return dict(with_new_names(STEP, measured))

    assert kernel(GROUPS=2, WORDS=0) == kernel()
    assert kernel(GROUPS=4)["version"] == kernel(WORDS=1)["version"] == 0


def test_a_step_reads_its_weights_and_its_cache_once() -> None:
    weights = 4 * (4096 * (2 * 16 + 2 * 4) * 128 + 3 * 4096 * 7168) + 64128 * 4096
    assert LLAMA.cost.memory_bytes == 2 * (weights + 4 * 2 * 2048 * 4 * 128)


def explained(fabric: Any) -> list[Any]:
    """Why a step on the host has no account: without a record, and with one for the kernel."""
    from taxfree_tune.benching.model_tasks import Phase
    from taxfree_tune.benching.step_tasks import explain_step

    return [explain_step(fabric, MODEL, "bfloat16", Phase("decode", 1, 5), [], 1)]


def test_a_step_of_operations_has_no_account(ranks: Ranks) -> None:
    (why,), _ = ranks.run(2, f"{__name__}:explained")
    assert why.startswith("operations: the kernel is interpreted here")


def test_an_account_tells_hand_offs_from_tails() -> None:
    """Two programs, one layer: 10 us of each phase, hand-offs of 1 us, one waits 4 us longer."""
    import torch

    from taxfree_kernels.decode_step.tape import EVENTS
    from taxfree_tune.taxes.step import account

    waits = {"counted": 1, "waited": 1, "x of qkv": 1, "x of gate": 1}
    fast = torch.tensor([waits.get(name, 10) for name in EVENTS] + [1, 10])
    slow = fast.clone()
    slow[EVENTS.index("waited")] += 4
    ends = torch.stack((fast, slow)).cumsum(1) * 2000  # at 2 GHz
    times = torch.zeros(2, 2, len(EVENTS), dtype=torch.int64)
    times.view(2, -1)[:, : ends.shape[1]] = ends
    found = account(times, EVENTS, total_us=100.0, bytes_us=60.0, clock_ghz=2.0)
    works = ("qkv", "attention", "o", "gate", "down", "head")
    assert found.phases == dict.fromkeys(works, 10.0)
    assert (found.hand_offs_us, found.tails_us) == (8.0, 2.0)
    assert found.rest_us == 30.0
