"""The frame of the command line: finding commands, exit codes, errors, help."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

import taxfree_cli.shapes
from taxfree.errors import (
    BelowTarget,
    HardwareError,
    NoRecord,
    TaxfreeError,
    UsageError,
    WorkerLost,
    WrongResult,
)
from taxfree_cli.output import print_json, print_table, warn
from taxfree_kernels.errors import FabricUnavailable, PeerTimeout
from taxfree_tuning_db import DatabaseError


@pytest.fixture
def failing(monkeypatch):
    """Make `taxfree shapes` raise."""

    def set_error(error):
        def shapes() -> None:
            raise error

        monkeypatch.setattr(taxfree_cli.shapes, "shapes", shapes)

    return set_error


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (TaxfreeError("it failed"), 1),
            (BelowTarget("too slow"), 1),
            (NoRecord("no record"), 1),
            (DatabaseError("database is locked", "wait"), 1),
            (UsageError("no such thing"), 2),
            (HardwareError("no GPU"), 3),
            (FabricUnavailable("no NVLink", "use --fabric host"), 3),
            (WrongResult("1 of 8 ranks is wrong"), 4),
            (WorkerLost("rank 3 died"), 5),
            (PeerTimeout("rank 0 waited for rank 3"), 5),
            (KeyboardInterrupt(), 130),
        ],
    )
    def test_each_error_has_its_code(self, cli, failing, error, code):
        failing(error)
        assert cli("shapes").code == code

    def test_an_exit_code_of_a_command_is_kept(self, cli, failing):
        failing(SystemExit(7))
        with pytest.raises(SystemExit, match="7"):
            cli("shapes")

    def test_success_is_0(self, cli):
        assert cli("shapes").code == 0


class TestErrors:
    def test_are_one_line_and_one_hint(self, cli, failing):
        failing(TaxfreeError("two\nlines of text.", "do [this]\nnext"))
        assert cli("shapes").err == "error: two lines of text\nhint: do [this] next\n"

    def test_without_a_hint_are_one_line(self, cli, failing):
        failing(TaxfreeError("it failed"))
        assert cli("shapes").err == "error: it failed\n"

    def test_are_not_broken_where_the_terminal_is_narrow(self, cli, failing, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        failing(TaxfreeError("long " * 30 + "end"))
        assert cli("shapes").err.count("\n") == 1

    def test_that_nobody_foresaw_show_no_traceback(self, cli, failing):
        failing(ZeroDivisionError("division by zero"))
        outcome = cli("shapes")
        assert outcome.code == 1
        assert outcome.err.startswith("error: ZeroDivisionError: division by zero\nhint: ")
        assert "Traceback" not in outcome.err

    def test_show_a_traceback_when_debugging(self, cli, failing, monkeypatch):
        monkeypatch.setenv("TAXFREE_DEBUG", "1")
        failing(ZeroDivisionError("division by zero"))
        outcome = cli("shapes")
        assert "Traceback" in outcome.err
        assert "error: ZeroDivisionError" in outcome.err

    def test_survive_a_wrong_debug_variable(self, cli, failing, monkeypatch):
        monkeypatch.setenv("TAXFREE_DEBUG", "maybe")
        failing(TaxfreeError("it failed"))
        assert cli("shapes").err == "error: it failed\n"

    def test_say_how_to_install_torch(self, cli, failing):
        failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
        outcome = cli("shapes")
        assert outcome.code == 1
        assert "taxfree[cuda]" in outcome.err

    def test_name_the_node_that_is_not_the_first(self, cli, failing, second_node):
        failing(TaxfreeError("it failed"))
        assert cli("shapes").err == "error: node 1: it failed\n"


class TestCommands:
    def test_help_fits_a_narrow_terminal(self, process):
        result = process("-m", "taxfree_cli.app", "shapes", "--help", COLUMNS="40")
        assert result.returncode == 0
        assert "…" not in result.stdout
        assert "--shapes" in result.stdout

    def test_help_names_the_commands_and_the_environment(self, cli):
        outcome = cli("--help")
        for word in ("db", "shapes", "TAXFREE_DB", "--install-completion"):
            assert word in outcome.out

    def test_nothing_prints_the_help(self, cli):
        assert cli() == cli("--help")
        assert cli("db") == cli("db", "--help")

    def test_the_version_is_printed(self, cli):
        assert re.fullmatch(r"taxfree \d+\.\d+\.\d+\n", cli("--version").out)

    def test_a_typo_gets_a_suggestion(self, cli):
        assert "Did you mean 'shapes'" in cli("shaps").err

    def test_the_function_named_like_its_module_is_the_command(self, cli, monkeypatch):
        """The convention that each command's file relies on."""

        def shapes(count: int = 1) -> None:
            """Count."""
            print(count + 1)

        monkeypatch.setattr(taxfree_cli.shapes, "shapes", shapes)
        assert cli("shapes", "--count", 4).out == "5\n"

    @pytest.mark.parametrize(("typed", "offered"), [("sh", "shapes"), ("shapes --op all", "all_")])
    def test_the_shell_completes(self, process, typed, offered):
        result = process(
            "-m",
            "taxfree_cli.app",
            _TAXFREE_COMPLETE="complete_bash",
            COMP_WORDS=f"taxfree {typed}",
            COMP_CWORD=str(len(typed.split())),
        )
        assert result.stdout.startswith(offered)


class TestOutput:
    def test_one_json_document_is_all_that_stdout_holds(self, process):
        result = process("-m", "taxfree_cli.app", "shapes", "--shapes", "paper", "--json")
        assert len(json.loads(result.stdout)["problems"]) == 11
        assert result.stderr == ""

    def test_other_nodes_are_silent(self, cli, second_node):
        assert cli("shapes", "--shapes", "demo").out == ""
        assert cli("shapes", "--shapes", "demo", "--json").out == ""

    def test_no_colour_where_nobody_watches(self, cli):
        assert "\x1b" not in cli("shapes").out + cli("shaps").err

    def test_a_table_that_nobody_watches_is_not_broken(self, cli):
        assert len(cli("shapes", "--shapes", "demo").out.splitlines()) == 4

    @pytest.mark.parametrize("command", [[], ["db"]])
    def test_help_cuts_nothing_off_and_has_a_short_name(self, cli, command):
        out = cli(*command, "-h").out
        assert out == cli(*command, "--help").out
        assert "..." not in out.partition("Commands:")[2]
        assert max(map(len, out.splitlines())) <= 80

    def test_the_version_has_a_short_name(self, cli):
        assert cli("-V").out == cli("--version").out

    def test_a_narrow_table_loses_nothing(self, cli, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        outcome = cli("shapes", "--shapes", "1x3584x8192")
        assert max(map(len, outcome.out.splitlines())) <= 40
        assert "…" not in outcome.out

    def test_bars_are_drawn_where_ascii_alone_is_taken(self, process):
        result = process(
            "-c", "from taxfree_cli.output import print_lines; print_lines(['█▒░ ±1.5'])",
            PYTHONIOENCODING="ascii",
        )  # fmt: skip
        assert result.stdout == "#+. ~1.5\n"

    def test_a_title_is_shown_as_it_is(self, capsys):
        print_table(["a"], [["b" * 40]], title="compared with [/old].json")
        assert capsys.readouterr().out.startswith("compared with [/old].json")

    def test_json_refuses_what_json_has_no_word_for(self):
        with pytest.raises(ValueError, match="not JSON compliant"):
            print_json({"us": float("nan")})

    def test_warnings_go_to_stderr(self, capsys):
        warn("old [driver]")
        assert capsys.readouterr() == ("", "warning: old [driver]\n")

    @pytest.mark.parametrize(
        ("closed", "command", "code"),
        [(1, "shapes", 0), (1, "db path", 0), (2, "shapes --shapes bad", 2), (1, "bad", 2)],
    )
    def test_what_the_caller_has_closed_is_not_missed(self, process, closed, command, code):
        script = (
            "import os, sys\n"
            f"os.close({closed})\n"
            f"command = [sys.executable, '-m', 'taxfree_cli.app', *{command.split()}]\n"
            "os.execv(sys.executable, command)"
        )
        result = process("-c", script)
        assert result.returncode == code
        assert "Traceback" not in result.stderr

    def test_what_the_terminal_cannot_show_is_escaped(self, process):
        result = process("-m", "taxfree_cli.app", "db", "path", "--db", "\udcff")
        assert (result.returncode, result.stdout) == (0, "\\udcff\n")

    @pytest.mark.parametrize("json", [[], ["--json"]])
    def test_a_reader_that_leaves_is_no_error(self, process, json):
        script = textwrap.dedent(f"""
            import subprocess, sys
            shape = "m=" + ",".join(map(str, range(1, 4000))) + " n=64 k=64"
            command = [sys.executable, "-m", "taxfree_cli.app", "shapes", *{json}]
            with subprocess.Popen([*command, "--shapes", shape], stdout=-1) as writer:
                writer.stdout.readline()
                writer.stdout.close()
            sys.exit(writer.returncode)
        """)
        result = process("-c", script)
        assert (result.returncode, result.stderr) == (0, "")


def test_a_misspelt_variable_is_named(cli, monkeypatch):
    monkeypatch.setenv("TAXFREE_STICT", "1")
    outcome = cli("db", "path")
    assert outcome.code == 0
    assert "TAXFREE_STICT is no variable of taxfree: did you mean TAXFREE_STRICT?" in outcome.err


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("tune --fabric host", "continues from its finished trials"),
        ("tune --dry-run --hardware h200 --gpus 2", "nothing is stored"),
        ("doctor --fabric host", "nothing is stored"),
    ],
)
def test_what_is_kept_is_said_where_something_is(cli, monkeypatch, command, kept):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("taxfree_cli.tune.search", interrupted)
    monkeypatch.setattr("taxfree_tune.doctor.examine", interrupted)
    monkeypatch.setattr("taxfree_cli.tune.list_candidates", interrupted)
    outcome = cli(*command.split())
    assert outcome.code == 130
    assert kept in outcome.err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["shapes", "--shapes", "demo"], ["db", "list"], ["db", "path"]]
)
def test_what_needs_no_gpu_imports_no_heavy_library(process, arguments):
    script = textwrap.dedent(f"""
        import sys
        from taxfree_cli.app import run
        code = run({arguments!r})
        heavy = {{"torch", "triton", "optuna", "altair"}} & set(sys.modules)
        assert not heavy, heavy
        sys.exit(code)
    """)
    result = process("-c", script)
    assert result.returncode == 0, result.stderr


class TestTables:
    ROWS = (("m=16 n=64", 12.345, 3, None), ("m=5 n=8", 61234.5, 20, "no heap"))

    @pytest.fixture
    def shown(self, capsys, monkeypatch):
        def show(width):
            monkeypatch.setenv("COLUMNS", str(width))
            print_table(("problem", "us", "runs", "refused"), self.ROWS)
            return capsys.readouterr().out.splitlines()

        return show

    @pytest.mark.parametrize("columns", [0, 1, "wide"])
    def test_a_terminal_of_no_width_is_printed_to(self, shown, columns):
        assert shown(columns)[0].split()[0] in ("problem", "m=16")

    def test_a_row_is_a_line_where_there_is_room(self, shown):
        assert [line.split() for line in shown(60)] == [
            ["problem", "us", "runs", "refused"],
            ["m=16", "n=64", "12.35", "3"],
            ["m=5", "n=8", "61234", "20", "no", "heap"],
        ]

    def test_a_row_is_a_list_where_there_is_not(self, shown):
        assert shown(20) == [
            "m=16 n=64",
            "  us       12.35",
            "  runs     3",
            "m=5 n=8",
            "  us       61234",
            "  runs     20",
            "  refused  no heap",
        ]
