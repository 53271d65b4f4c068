"""A tuning table for the small models of these tests, so that fused variants run under them.

`records.yaml` names the problems and the variants that won. Configs and versions are those of now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import yaml

from taxfree_tuning_db import Database, Record
from tests.taxfree.runtime_tasks import problem_of, record_of

_TABLE = Path(__file__).with_name("records.yaml")


def records_of(fabric: Any) -> list[Record]:
    """The table's records for the ranks of a fabric."""
    return [
        record_of(
            fabric, problem_of(entry["op"], dtype="bfloat16", **entry["problem"]), entry["variant"]
        )
        for entry in yaml.safe_load(_TABLE.read_text())
    ]


@contextmanager
def tuned(fabric: Any, folder: str) -> Iterator[None]:
    """Runtimes that are opened here read the table from a database, as after `taxfree tune`."""
    path = Path(folder) / "tuning.sqlite"
    if fabric.rank == 0:
        with Database(path) as database:
            for record in records_of(fabric):
                database.put(record)
    dist.barrier()
    with mock.patch.dict(os.environ, TAXFREE_DB=str(path)):
        yield
