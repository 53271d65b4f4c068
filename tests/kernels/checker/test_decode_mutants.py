"""Every mutant of flash_decode's synchronisation is reported, but for one that changes nothing."""

from __future__ import annotations

from itertools import chain

import pytest

from taxfree_kernels.checker import check_variant
from taxfree_kernels.checker.mutate import mutants
from taxfree_kernels.flash_decode import (
    exchange,
    fine_wait,
    fused,
    gather,
    persistent,
    two_shot,
)

pytestmark = pytest.mark.timeout(300)

OP = "flash_decode"
SEEDS = range(8)

#: variant -> the functions whose mutants are looked for in it
FUNCTIONS = {
    "fused": (
        fused._push_and_combine,
        exchange.merge_into_inboxes,
        exchange.merge_and_push,
        exchange._merge_into_words,
        exchange._send_to_peers,
        exchange._received_rows,
        exchange.store_at_peers,
        exchange.combine,
    ),
    "gather": (gather._gather, gather._copy_rows, exchange.send_chunk),
    "fine_wait": (fine_wait._send, fine_wait._combine, exchange.wait_for_rows),
    "persistent": (persistent._decode,),
    "two_shot": (two_shot._two_shot, two_shot._combine_for_all, two_shot._receive),
}

HARMLESS = {
    # Whoever goes on to the next call has heard from owners that have read what was sent to them.
    # Other variants on the same pool need the second slot.
    "_two_shot: one payload slot",
}


@pytest.mark.parametrize("variant", FUNCTIONS)
def test_a_mutant_that_is_not_reported_changes_nothing(variant):
    survivors = []
    for mutant in mutants(FUNCTIONS[variant]):
        with mutant.installed():
            if check_variant(OP, variant, seeds=SEEDS).violation is None:
                survivors.append(str(mutant).partition(" ")[2])
    assert set(survivors) <= HARMLESS


def test_there_are_mutants_of_all_variants():
    found = {variant: list(mutants(functions)) for variant, functions in FUNCTIONS.items()}
    assert all(len(each) >= 8 for each in found.values())
    assert len(list(chain(*found.values()))) > 80
