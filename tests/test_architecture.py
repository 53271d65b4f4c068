"""The rooms: what they import, and what they must not contain."""

from __future__ import annotations

import ast
import os
import re
import statistics
import subprocess
import sys
from itertools import chain
from pathlib import Path

import grimp
import pytest

from taxfree_kernels.variant import operation_names, variants
from tests.rooms import PYPROJECT, PYTHONPATH, ROOT

#: modules of kernels/ that a variant imports, directly or not
MOST_FILES, USUAL_FILES = 17, 12
UNCOUNTED = {"taxfree_kernels.errors", "taxfree_kernels.hardware"}
ENVIRONMENT = os.environ | {"PYTHONPATH": PYTHONPATH}


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a statement imports in a process of its own."""
    script = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_the_import_layers_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("source_root", ["kernels", "tuning_db", "tune", "check"])
def test_source_roots_are_no_packages(source_root):
    """`kernels` is the import name of another project that engines install too."""
    assert (ROOT / source_root).is_dir()
    assert not (ROOT / source_root / "__init__.py").exists()


def test_raw_atomics_stand_in_the_primitives_alone():
    """What synchronises can be checked, gated and read in one place."""
    package = ROOT / "kernels/taxfree_kernels"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("tl.atomic_")
    }
    assert found == {"device/packets.py", "device/sync.py"}


def test_few_files_lie_behind_a_variant():
    """Whoever mends a kernel reads the variant and these; the uncounted are mere lists."""
    graph = grimp.build_graph("taxfree_kernels", exclude_type_checking_imports=True, cache_dir=None)
    files = {
        f"{op} {name}": len(graph.find_upstream_modules(type(variant).__module__) - UNCOUNTED)
        for op in operation_names()
        for name, variant in variants(op).items()
    }
    assert max(files.values()) <= MOST_FILES, files
    assert statistics.median(files.values()) <= USUAL_FILES, files


def test_the_runtime_knows_no_variant_by_name():
    """But the baseline."""
    variants = {
        path.stem
        for path in (ROOT / "kernels/taxfree_kernels").rglob("*.py")
        if "\nVARIANT = " in path.read_text()
    }
    found = [
        f"{path.name}: {node.value}"
        for path in (ROOT / "taxfree").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in variants - {"baseline"}
    ]
    assert found == []


def test_plans_become_callable_in_one_place():
    """Others have no peers: the checker, AMD's executor, and calls that nobody prepared."""
    rooms = (
        *("taxfree", "kernels", "tune", "check", "taxfree_cli"),
        *("benchmarks", "integrations", "examples"),
    )
    found = {
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and any(name(each) == "Ready" for each in called_by(node))
    }
    package = "check/taxfree_check"
    assert found == {
        "taxfree/_runtime/plans.py", "taxfree/_runtime/ready.py", f"{package}/checker/trial.py",
        f"{package}/executed/run.py",
    }  # fmt: skip


def called_by(call: ast.Call) -> list[ast.expr]:
    """The function of a call, and functions among its arguments: of `partial`, or `map`."""
    is_other = ast.unparse(call.func) != "isinstance"
    return [call.func, *(call.args if is_other else [])]


def name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def test_device_functions_take_few_parameters():
    """What belongs together travels as one NamedTuple."""
    found = [
        f"{path.name}: {node.name}"
        for path in (ROOT / "kernels/taxfree_kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and len(node.args.args) > 16
        if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert found == []


def test_the_library_brings_no_command_line_tuner_or_plots():
    assert imported_by("import taxfree") & {"typer", "rich", "optuna", "altair"} == set()


def test_an_engine_loads_nothing_that_tunes_or_proves():
    statement = (
        "import taxfree._runtime.startup, taxfree.models.parallel, taxfree.models.inductor\n"
        "for name in taxfree.__all__: getattr(taxfree, name)"
    )
    above = {"taxfree_tune", "taxfree_check", "taxfree_cli", "optuna", "rich", "typer"}
    assert imported_by(statement) & above == set()


def test_problems_and_shapes_need_no_torch():
    statement = (
        "from taxfree_tune.shapes import *\n"
        "from taxfree_kernels.variant import *\n"
        "for op in operation_names(): problem_class(op)"
    )
    assert imported_by(statement) & {"torch", "triton"} == set()


def test_the_tuning_database_needs_neither_torch_nor_the_kernels():
    unwanted = {"torch", "triton", "optuna", "taxfree", "taxfree_kernels"}
    assert not imported_by("import taxfree_tuning_db") & unwanted


def test_core_dependencies_name_neither_torch_nor_triton():
    """A ROCm build of torch brings its own Triton."""
    core = " ".join(PYPROJECT["project"]["dependencies"])
    assert "torch" not in core
    assert "triton" not in core
    assert "altair" not in core


def test_the_constraints_pin_all_that_is_named():
    lines = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pinned = {re.split("[=<]", line)[0].lower() for line in lines if "=" in line}
    project = PYPROJECT["project"]
    named = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert {name.split(">")[0].lower() for name in named} <= pinned


def test_who_uses_it_without_torch_is_told_what_to_install():
    script = (
        "import sys\nsys.modules['torch'] = None\nimport taxfree\n"
        "try:\n    taxfree.init\nexcept ModuleNotFoundError as error:\n"
        "    print(*error.__notes__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert out.startswith("pip install 'taxfree[cuda]' or 'taxfree[cpu]'")
