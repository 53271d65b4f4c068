"""The package as others see it."""

import taxfree_tuning_db
from tests.tuning_db.examples import ROOT, start_python

PUBLIC = """
    Change Database DatabaseCorrupt DatabaseError DatabaseFull DatabaseLocked DatabaseMissing
    DatabaseReadOnly DatabaseTooNew DatabaseUnreadable Difference ForeignRecord
    HardwareFingerprint ImportReport InvalidRecord LookUp LookupStep MODES Measurement
    NotAnExport OF_A_BENCH OF_A_LENDER Query Record SCHEMA_VERSION Scalar
    SoftwareFingerprint TRIAL_STATES Table TrialRecord TrialState default_path differences
    differing_fields export import_records look_up neighbours plan_import prune read_export
    read_table record_key shipped_records stale_reason
"""


class TestPublicNames:
    def test_all_is_the_promised_list(self):
        assert sorted(taxfree_tuning_db.__all__) == sorted(PUBLIC.split())

    def test_every_name_of_all_is_there(self):
        assert all(hasattr(taxfree_tuning_db, name) for name in taxfree_tuning_db.__all__)

    def test_the_errors_are_all_database_errors(self):
        errors = [getattr(taxfree_tuning_db, name) for name in taxfree_tuning_db.__all__]
        errors = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
        assert len(errors) == 11
        assert all(issubclass(each, taxfree_tuning_db.DatabaseError) for each in errors)


class TestImports:
    def test_the_source_root_is_no_package(self):
        assert not (ROOT / "tuning_db" / "__init__.py").exists()

    def test_importing_it_loads_nothing_heavy(self):
        script = (
            "import sys, taxfree_tuning_db;"
            "print(*{'torch', 'triton', 'optuna', 'typer', 'rich', 'taxfree'} & set(sys.modules))"
        )
        output, _ = start_python(script).communicate(timeout=400)
        assert output == "\n"
