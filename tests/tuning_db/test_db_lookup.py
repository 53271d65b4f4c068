"""Look-up: which record serves a problem, and why."""

import math
from dataclasses import replace

import pytest

from taxfree_tuning_db import (
    Database,
    InvalidRecord,
    LookUp,
    Query,
    Record,
    Table,
    differing_fields,
    look_up,
    neighbours,
    prune,
    stale_reason,
)
from tests.tuning_db.examples import (
    BASELINE,
    H200,
    MI300X,
    OP,
    PUSH,
    SOFTWARE,
    VERSIONS,
    problem_of,
    record_of,
)

EARLIER = replace(PUSH, version=1)
UNKNOWN = replace(PUSH, variant="pull")


def find(
    table: Table,
    m: int,
    near: tuple[str, ...] = ("m",),
    free: tuple[str, ...] = (),
    max_log2_distance: float = math.inf,
    **fields: object,
) -> LookUp:
    problem = problem_of(m, **fields)
    query = Query(OP, problem, H200, SOFTWARE, VERSIONS, near, free, max_log2_distance)
    return look_up(table, query)


def table_of(*records: Record) -> Table:
    return Table(user=records)


class TestOtherDevices:
    """What serves a device beside records of exactly its fingerprint."""

    def test_its_records_serve_whatever_its_driver_says_of_its_memory(self):
        then = replace(H200, memory_bytes=H200.memory_bytes - (1 << 30))
        table = table_of(record_of(16, hardware=then))
        assert find(table, 16).kind == "miss"
        answer = find(table.own(H200), 16)
        assert (answer.kind, answer.record) == ("exact", record_of(16))
        half = replace(H200, memory_bytes=H200.memory_bytes // 2)
        assert table.own(half) is table

    def test_devices_that_compute_alike_lend_the_nearest_in_memory_first(self):
        h100 = replace(H200, gpu="NVIDIA H100", memory_bytes=H200.memory_bytes // 2)
        h400 = replace(H200, gpu="NVIDIA H400", memory_bytes=H200.memory_bytes * 2)
        far = record_of(16, hardware=h400, winner=replace(PUSH, config={"block_m": 32}))
        table = table_of(far, record_of(16), record_of(64))
        found = look_up(
            table.lent_to(h100), Query(OP, problem_of(16), h100, SOFTWARE, VERSIONS, ("m",))
        )
        assert (found.kind, found.record.winner, found.record.lender) == ("exact", PUSH, H200.gpu)
        assert found.record.hardware == h100
        assert list(table_of(record_of(16)).lent_to(H200).records()) == []

    @pytest.mark.parametrize(
        "change",
        [{"compute_units": 114}, {"architecture": "sm_100"}, {"num_xcds": 2}, {"link": "pcie"}],
    )
    def test_others_lend_nothing(self, change):
        other = replace(H200, gpu="another", **change)
        assert list(table_of(record_of(16)).lent_to(other).records()) == []

    def test_what_was_lent_serves_its_own_problem_and_nothing_that_ships_for_it(self):
        lent = record_of(16, provenance={"source": "user", "method": "lent", "lender": "another"})
        assert find(table_of(lent), 16).record == lent
        assert find(table_of(lent), 20).kind == "miss"
        shipped = record_of(16, provenance={"source": "shipped"})
        assert find(Table(user=[lent], shipped=[shipped]), 16).record == shipped


class TestExact:
    def test_its_own_record_is_found(self):
        answer = find(table_of(record_of(16), record_of(64)), 64)
        assert (answer.kind, answer.record) == ("exact", record_of(64))
        assert [step.found for step in answer.lookup_trace] == [True, True]
        assert answer.soft_mismatches == ()

    @pytest.mark.parametrize("field", ["triton", "torch", "driver", "runtime", "collectives"])
    def test_other_software_is_used_and_flagged(self, field):
        record = record_of(16, software=replace(SOFTWARE, **{field: "older"}))
        answer = find(table_of(record), 16)
        assert answer.kind == "exact"
        assert answer.soft_mismatches == (field,)

    def test_another_taxfree_with_the_same_kernel_is_not_flagged(self):
        record = record_of(16, software=replace(SOFTWARE, taxfree="0.9"))
        assert find(table_of(record), 16).soft_mismatches == ()

    def test_a_problem_that_is_no_problem_is_refused(self):
        with pytest.raises(InvalidRecord, match="problem"):
            find(table_of(), None)


class TestUserOverShipped:
    def test_the_users_record_stands_over_the_shipped_one(self):
        table = Table([record_of(16, winner=BASELINE)], [record_of(16), record_of(64)])
        assert find(table, 16).record.winner == BASELINE
        assert find(table, 64).record == record_of(64)
        assert len(list(table.records())) == 2

    @pytest.mark.parametrize("winner", [EARLIER, UNKNOWN])
    def test_a_shipped_record_of_todays_version_precedes_the_users_of_another(self, winner):
        table = Table([record_of(16, winner=winner)], [record_of(16)])
        answer = find(table, 16)
        assert (answer.kind, answer.record) == ("exact", record_of(16))
        neighbour = find(table, 32)
        assert (neighbour.kind, neighbour.record) == ("neighbour", record_of(16))


class TestWithRecords:
    def test_they_come_first_and_nothing_else_changes(self):
        old, new, shipped = record_of(16), record_of(16, winner=EARLIER), record_of(64)
        before = Table(user=[old], shipped=[shipped])
        after = before.with_records([new])
        assert list(before.records()) == [old, shipped]
        assert list(after.records()) == [new, shipped]
        assert after.layers(old.key) == (new, old)


class TestAnotherVersion:
    @pytest.mark.parametrize("version", [0, 1, 3])
    def test_its_own_record_serves_and_says_so(self, version):
        winner = replace(PUSH, version=version)
        answer = find(table_of(record_of(16, winner=winner), record_of(32)), 16)
        assert (answer.kind, answer.record.winner) == ("another version", winner)
        why = f"measured with version {version} of push, now 2"
        assert answer.lookup_trace[-1].why == why

    def test_a_neighbour_serves_and_says_so(self):
        answer = find(table_of(record_of(16, winner=EARLIER)), 32)
        assert (answer.kind, answer.record.winner) == ("neighbour", EARLIER)
        assert answer.lookup_trace[-1].why.endswith("measured with version 1 of push, now 2")

    def test_a_config_that_is_illegal_by_now_gives_way_to_a_neighbour(self):
        own = record_of(16, winner=EARLIER)
        query = replace(
            Query(OP, problem_of(16), H200, SOFTWARE, VERSIONS, ("m",)),
            illegal_reason=lambda record: "has no such tile" if record == own else None,
        )
        answer = look_up(table_of(own, record_of(64)), query)
        assert (answer.kind, answer.record) == ("neighbour", record_of(64))
        alone = look_up(table_of(own), query)
        assert (alone.kind, alone.miss_reason) == ("refused", "has no such tile")


class TestUnknownVariant:
    def test_it_is_shown_and_not_used(self):
        answer = find(table_of(record_of(16, winner=UNKNOWN)), 16)
        assert (answer.kind, answer.record.winner) == ("refused", UNKNOWN)
        assert answer.lookup_trace[1].why == "variant pull is unknown"

    def test_a_neighbour_serves_instead(self):
        answer = find(table_of(record_of(16, winner=UNKNOWN), record_of(64)), 16)
        assert (answer.kind, answer.record) == ("neighbour", record_of(64))

    def test_a_record_without_a_field_is_nobodys_neighbour(self):
        older = {name: value for name, value in problem_of(64).items() if name != "gather_dim"}
        table = table_of(record_of(64, problem=older))
        assert find(table, 16, free=("gather_dim",)).kind == "miss"

    def test_it_is_nobodys_neighbour(self):
        answer = find(table_of(record_of(16, winner=UNKNOWN)), 32)
        assert (answer.kind, answer.record) == ("miss", None)
        assert answer.nearest.winner == UNKNOWN

    def test_only_the_winner_must_be_todays(self):
        runners_up = (UNKNOWN, EARLIER)
        assert stale_reason(record_of(16, runners_up=runners_up), VERSIONS) is None


class TestNeighbour:
    @pytest.mark.parametrize(("m", "nearest"), [(1, 12), (13, 48), (24, 48), (25, 48), (4096, 48)])
    def test_it_is_the_next_larger_else_the_nearest_by_ratio(self, m, nearest):
        answer = find(table_of(record_of(48), record_of(12)), m)
        assert answer.kind == "neighbour"
        assert answer.record == record_of(nearest)
        assert answer.lookup_trace[-1].why.endswith(f" is m={nearest}")

    @pytest.mark.parametrize(("m", "nearest"), [(7, 12), (13, 12), (23, 12), (24, 48), (25, 48)])
    def test_within_reach_a_larger_one_comes_before_a_nearer_one(self, m, nearest):
        answer = find(table_of(record_of(48), record_of(12)), m, max_log2_distance=1)
        assert answer.record == record_of(nearest)

    def test_distances_of_several_fields_add_up(self):
        far_in_both = record_of(32, problem=problem_of(32, n=7168))
        far_in_one = record_of(64)
        table = table_of(far_in_one, far_in_both)
        assert find(table, 16, ("m", "n"), n=7168).record == far_in_both
        assert find(table, 16, ("m", "n")).record == far_in_both  # a tie: m decides

    @pytest.mark.parametrize(
        "fields", [{"n": 4096}, {"world_size": 4}, {"dtype": "float16"}, {"gather_dim": 1}]
    )
    def test_all_other_fields_must_agree(self, fields):
        assert find(table_of(record_of(16)), 32, **fields).kind == "miss"

    def test_both_must_have_the_same_fields(self):
        assert find(table_of(record_of(16)), 32, layout="nk").kind == "miss"

    def test_other_hardware_or_another_operation_is_no_neighbour(self):
        table = table_of(record_of(16, hardware=MI300X), record_of(16, op="attention"))
        assert find(table, 32).kind == "miss"

    @pytest.mark.parametrize("m", [0, -4, True, "wide"])
    def test_what_has_no_logarithm_has_no_neighbour(self, m):
        assert find(table_of(record_of(16)), m).kind == "miss"
        assert find(table_of(record_of(m)), 16).kind == "miss"

    def test_the_world_size_never_varies(self):
        with pytest.raises(ValueError, match="world_size"):
            find(table_of(), 16, ("m", "world_size"))

    def test_it_may_differ_in_free_fields_and_agrees_in_more_of_them(self):
        plain, biased = (record_of(16, problem=problem_of(16, bias=bias)) for bias in (False, True))
        other = table_of(plain)
        assert find(other, 16, bias=True).kind == "miss"
        assert find(other, 16, free=("bias",), bias=True).record == plain
        far = record_of(128, problem=problem_of(128, bias=True))
        assert find(table_of(far, plain), 16, free=("bias",), bias=True).record == plain
        assert find(table_of(plain, biased), 32, free=("bias",), bias=True).record == biased

    def test_without_near_fields_there_is_none(self):
        assert find(table_of(record_of(16)), 32, ()).kind == "miss"

    def test_all_that_may_lend_are_there_the_nearest_first(self):
        others = [record_of(m) for m in (128, 8, 64)]
        foreign = [record_of(16, hardware=MI300X), record_of(16, problem=problem_of(16, n=4096))]
        found = neighbours([*foreign, *others], problem_of(32), H200, ("m",), ())
        assert [record.problem["m"] for record in found] == [64, 8, 128]


class TestMiss:
    def test_an_empty_table_says_so(self):
        answer = find(table_of(), 16)
        assert (answer.kind, answer.record, answer.nearest) == ("miss", None, None)
        assert [step.found for step in answer.lookup_trace] == [False, False, False]
        assert answer.lookup_trace[-1].why == f"{OP} was never tuned"

    def test_another_machine_is_named_and_not_its_fields(self):
        answer = find(table_of(record_of(16, hardware=MI300X)), 16)
        said = f"no record of {H200.gpu}; the nearest is of {MI300X.gpu}"
        assert answer.lookup_trace[-1].why == said
        other = replace(H200, compute_units=78)
        answer = find(table_of(record_of(16, hardware=other)), 16)
        assert answer.lookup_trace[-1].why.startswith(
            f"no record of {H200.gpu} of other compute_units; the nearest is of {H200.gpu}"
        )

    def test_the_nearest_differs_in_the_fewest_fields_and_then_the_least(self):
        elsewhere = record_of(16, hardware=MI300X)
        far = record_of(16, problem=problem_of(16, n=64))
        near = record_of(16, problem=problem_of(16, n=4096))
        answer = find(table_of(elsewhere, far, near), 16)
        assert answer.nearest == near
        assert answer.lookup_trace[-1].why == "n is 4096, not 3584"

    def test_differing_fields_are_shown_side_by_side(self):
        asked = problem_of(32, layout="nk")
        del asked["n"]
        assert differing_fields(record_of(16), asked) == {
            "m": (16, 32),
            "n": (3584, None),
            "layout": (None, "nk"),
        }

    def test_hardware_is_compared_where_it_is_given(self):
        differing = differing_fields(record_of(16), problem_of(16), replace(H200, link="pcie"))
        assert differing == {"hardware.link": ("nvlink-18", "pcie")}


class TestPrune:
    RECORDS = (
        record_of(16),
        record_of(32, winner=UNKNOWN),
        record_of(64, hardware=MI300X),
        record_of(128, op="embedding_all_to_all", winner=EARLIER),
    )

    @pytest.fixture
    def database(self, tmp_path):
        with Database(tmp_path / "tuning.sqlite") as database:
            for record in self.RECORDS:
                database.put(record)
            yield database

    def test_operations_that_are_not_named_are_left_alone(self, database):
        assert prune(database, {}) == []
        assert len(list(database.records())) == 4

    def test_unknown_variants_are_removed_by_operation(self, database):
        assert prune(database, {OP: VERSIONS}) == [self.RECORDS[1]]
        assert len(list(database.records())) == 3

    def test_other_versions_stay(self, database):
        assert prune(database, {"embedding_all_to_all": VERSIONS}) == []
        assert prune(database, {"embedding_all_to_all": {}}) == [self.RECORDS[3]]
