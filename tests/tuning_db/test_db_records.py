"""Records: what they accept, and their JSON."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taxfree_tuning_db import (
    MODES,
    InvalidRecord,
    Measurement,
    Record,
    TrialRecord,
    record_key,
)
from tests.tuning_db.examples import (
    H200,
    HUNG,
    MI300X,
    OP,
    PUSH,
    TRIAL,
    problem_of,
)
from tests.tuning_db.examples import record_of as a_record

names = st.text(min_size=1, max_size=8)
numbers = st.integers(min_value=0) | st.floats(min_value=0, allow_infinity=False)
scalars = (
    st.text(max_size=8)
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
configs = st.dictionaries(names, scalars, max_size=4)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    modes = draw(st.sets(st.sampled_from(MODES), min_size=1))
    return Measurement(
        variant=draw(names),
        config=draw(configs),
        version=draw(st.integers(0, 9)),
        median_us={mode: draw(numbers) for mode in modes},
        iqr_us={mode: draw(numbers) for mode in modes},
        samples=draw(st.integers(min_value=1)),
        relative_error=draw(st.none() | numbers),
    )


@st.composite
def records(draw: st.DrawFn) -> Record:
    return a_record(
        op=draw(names),
        problem=draw(configs) | problem_of(draw(st.integers())),
        winner=draw(measurements()),
        runners_up=tuple(draw(st.lists(measurements(), max_size=2))),
        seconds_spent=draw(numbers),
        provenance=draw(st.dictionaries(names.filter(lambda name: name != "created"), names)),
    )


def changed(path: str, value: object) -> dict:
    """Return the JSON of a record with another value at a path."""
    document = json.loads(json.dumps(a_record().to_json()))
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place[name]
    place[last] = value
    return document


class TestRoundTrip:
    @settings(max_examples=60, deadline=None, database=None)
    @given(records())
    def test_a_record_survives_json(self, record):
        text = json.dumps(record.to_json(), allow_nan=False)
        assert Record.from_json(json.loads(text)) == record

    @pytest.mark.parametrize("trial", [TRIAL, HUNG])
    def test_a_trial_survives_json(self, trial):
        assert TrialRecord.from_json(json.loads(json.dumps(trial.to_json()))) == trial


class TestValidation:
    @pytest.mark.parametrize(
        ("path", "value", "why"),
        [
            ("op", "", "empty"),
            ("op", 3, "not text"),
            ("problem", [], "not a mapping"),
            ("problem.m", None, "not a scalar"),
            ("problem.m", float("nan"), "not finite"),
            ("problem.world_size", 0, "below 1"),
            ("problem.world_size", True, "not an integer"),
            ("problem.dtype", 16, "not text"),
            ("hardware.compute_units", 132.0, "not an integer"),
            ("hardware.gpu", None, "not text"),
            ("software.triton", 3.6, "not text"),
            ("winner.variant", "", "empty"),
            ("winner.config.block_m", [64], "not a scalar"),
            ("winner.median_us.graph", "fast", "not a number"),
            ("winner.median_us.graph", True, "not a number"),
            ("winner.median_us.graph", float("inf"), "not finite"),
            ("winner.median_us.graph", -1.0, "negative"),
            ("winner.median_us.compiled", 1.0, "not a mode"),
            ("winner.median_us", {}, "no mode"),
            ("winner.iqr_us", {"graph": 1.0}, "modes unlike"),
            ("winner.samples", 0, "below 1"),
            ("winner.relative_error", "low", "not a number"),
            ("runners_up", {}, "not a list"),
            ("trials", -1, "below 0"),
            ("seconds_spent", float("nan"), "not finite"),
            ("provenance.created", "yesterday", "not an ISO time"),
            ("provenance.source", 1, "not text"),
            ("schema", 0, "is not 1"),
            ("schema", 2, "newer"),
        ],
    )
    def test_a_wrong_value_is_refused_by_the_path_of_its_field(self, path, value, why):
        with pytest.raises(InvalidRecord, match=why) as caught:
            Record.from_json(changed(path, value))
        assert caught.value.field == path

    def test_the_path_leads_into_lists(self):
        with pytest.raises(InvalidRecord, match="negative") as caught:
            Record.from_json(changed("runners_up.0.relative_error", -1))
        assert caught.value.field == "runners_up[0].relative_error"

    @pytest.mark.parametrize("path", ["extra", "winner.extra", "hardware.extra"])
    def test_an_unknown_field_is_refused(self, path):
        with pytest.raises(InvalidRecord, match=rf"^{path}: unknown field$"):
            Record.from_json(changed(path, 1))

    @pytest.mark.parametrize("field", list(a_record().to_json()))
    def test_a_missing_field_is_refused(self, field):
        document = a_record().to_json()
        del document[field]
        with pytest.raises(InvalidRecord, match=rf"^{field}: missing$"):
            Record.from_json(document)

    @pytest.mark.parametrize("field", ["world_size", "dtype"])
    def test_a_problem_tells_its_world_size_and_dtype(self, field):
        document = a_record().to_json()
        del document["problem"][field]
        with pytest.raises(InvalidRecord, match=rf"^problem.{field}: missing$"):
            Record.from_json(document)

    @pytest.mark.parametrize("document", [None, [], "record", 1])
    def test_what_is_no_object_is_refused(self, document):
        with pytest.raises(InvalidRecord, match="not a JSON object"):
            Record.from_json(document)

    def test_the_constructor_checks_too(self):
        with pytest.raises(InvalidRecord, match="samples"):
            replace(PUSH, samples=-1)

    def test_a_measured_trial_has_a_time_and_no_other_has(self):
        with pytest.raises(InvalidRecord, match="median_us"):
            replace(TRIAL, median_us={})
        with pytest.raises(InvalidRecord, match="median_us"):
            replace(HUNG, median_us={"graph": 1.0})

    def test_a_trial_has_a_known_state(self):
        with pytest.raises(InvalidRecord, match="state: is none of measured, refused"):
            replace(HUNG, state="lost")


class TestKey:
    def test_it_reads_as_what_it_stands_for(self):
        assert json.loads(record_key(OP, problem_of(16), H200)) == {
            "op": OP,
            "problem": problem_of(16),
            "hardware": asdict(H200),
        }

    def test_it_does_not_depend_on_the_order_of_fields(self):
        backwards = dict(reversed(problem_of(16).items()))
        assert record_key(OP, backwards, H200) == record_key(OP, problem_of(16), H200)

    def test_operation_problem_and_hardware_tell_keys_apart(self):
        keys = {
            record_key(OP, problem_of(16), H200),
            record_key("attention", problem_of(16), H200),
            record_key(OP, problem_of(32), H200),
            record_key(OP, problem_of(16, world_size=4), H200),
            record_key(OP, problem_of(16), MI300X),
            record_key(OP, problem_of(16), replace(H200, compute_units=114)),
        }
        assert len(keys) == 6

    def test_software_does_not_tell_keys_apart(self):
        other = replace(a_record().software, torch="2.12.0")
        assert a_record(software=other).key == a_record().key

    def test_a_problem_that_json_cannot_hold_is_refused(self):
        with pytest.raises(InvalidRecord, match=r"problem\.m: is not finite"):
            record_key(OP, problem_of(float("nan")), H200)
