"""The `taxfree` command: finds the module of a command, runs it, and turns errors into exit codes.

A command is a module of this package that defines a function of its own name, or a `typer.Typer`
of that name for a group of commands. It is imported when it is used, and imports torch, triton and
optuna inside its function, so that `--help` and `db` start fast and need no GPU.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from taxfree._version import __version__
from taxfree.errors import Interrupted, TaxfreeError, UsageError
from taxfree.settings import VARIABLES, Settings, unknown_variables
from taxfree_cli import imports_are_done
from taxfree_cli.exits import ExitCode, failure
from taxfree_cli.output import note, print_failure, warn
from taxfree_tune.workers.launch import LaunchedProcess
from taxfree_tune.workers.supervisor import Supervisors, supervise
from taxfree_tuning_db.errors import ForeignRecordWarning

_SHOWN = "what was finished is printed, and in the files that were asked for; nothing else is kept"
#: command -> what is left of it after Ctrl-C
_KEPT = {
    "tune": "finished results are kept; `taxfree tune` continues from its finished trials",
    "bench": _SHOWN,
    "explain": _SHOWN,
}
_show_warning = warnings.showwarning
_COMMANDS = ("tune", "bench", "explain", "report", "check", "doctor", "db", "shapes")


class _CommandModules(Mapping[str, Any]):
    """The commands; the module of each is imported when it is used."""

    def __getitem__(self, name: str) -> Any:
        if name not in _COMMANDS:
            raise KeyError(name)
        entry = getattr(importlib.import_module(f"taxfree_cli.{name}"), name)
        if isinstance(entry, typer.Typer):
            group = typer.main.get_group(entry)
            group.name = name
            return _unabridged(group)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(entry)
        return _unabridged(typer.main.get_command(single))

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


def _unabridged(command: Any) -> Any:
    """A command, and those of a group, whose first paragraphs stand whole in lists of commands."""
    for listed in (command, *getattr(command, "commands", {}).values()):
        listed.short_help = " ".join((listed.help or "").partition("\n\n")[0].split())
    return command


class _Commands(TyperGroup):
    """A group whose commands are found in modules."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": _CommandModules()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"taxfree {__version__}")
        raise typer.Exit


# Plain help: boxes cut words off where the terminal is narrow.
app = typer.Typer(
    cls=_Commands,
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="\n".join(
        ["\b", "Environment:"]
        + [
            textwrap.fill(f"{name}: {text}", 76, initial_indent="  ", subsequent_indent="    ")
            for name, text in VARIABLES.items()
        ]
    ),
)


@app.callback()
def taxfree(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Fused multi-GPU kernels: tune them, see what they save, and why."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; nothing is raised but SystemExit."""
    command = typer.main.get_command(app)
    warnings.showwarning = _show_foreign_records  # type: ignore[assignment]
    for name, like in unknown_variables().items():
        warn(f"{name} is no variable of taxfree" + (f": did you mean {like}?" if like else ""))
    try:
        _refuse_repeats(command, arguments)
        imports_are_done()
        # typer returns the code of an Exit here, and 130 for Ctrl-C
        code = command.main(list(arguments), prog_name="taxfree", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _stop_writing()
    except Exception as error:
        code = _report(error)
        _give_up_what_cannot_be_printed()
        return code
    if code == ExitCode.INTERRUPTED:
        stores = not {"--dry-run", "--check"}.intersection(arguments)
        name = next(iter(arguments), "")
        kept = _KEPT.get(name if stores else "", "nothing is stored")
        print_failure(failure(Interrupted("interrupted", kept)))
    return code if isinstance(code, int) else ExitCode.DONE


def _show_foreign_records(message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print a warning that is written for users as a problem, others as Python does."""
    if issubclass(category, ForeignRecordWarning):
        warn(str(message))
    else:
        _show_warning(message, category, *place)


def _refuse_repeats(command: Any, arguments: Sequence[str]) -> None:
    """Stop where an option that has one value is given twice: the last would win, unsaid.

    Raises:
        UsageError: naming the first.
    """
    names = iter(arguments)
    while hasattr(command, "commands"):
        command = command.commands.get(next(names, ""))
    options = [
        option
        for option in getattr(command, "params", ())
        if option.param_type_name == "option" and not (option.multiple or option.is_flag)
    ]
    words = [word.partition("=")[0] for word in names]
    for option in options:
        if sum(word in option.opts for word in words) > 1:
            raise UsageError(f"{option.opts[0]} is given twice", "give it once")


def main() -> None:
    """Entry point of the `taxfree` script."""
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may be no text, a terminal no Unicode
        sys.stdout.reconfigure(errors="backslashreplace")
    # SIGTERM, which `timeout` and schedulers send, is handled like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(_launched(sys.argv[1:]))


def _launched(arguments: Sequence[str]) -> int:
    """Run a command line, as the process that a launcher may have started; return its exit code."""
    try:
        launch = LaunchedProcess.from_environment()
        if launch.local_rank:
            return supervise(launch)
        if launch.node and arguments[:1] != ["tune"]:
            note("only `tune` runs on several nodes", every_node=True)
            return ExitCode.DONE
        if launch.local_ranks == 1:
            return run(arguments)
        with Supervisors(launch) as supervisors:
            supervisors.code = run(arguments)
        return supervisors.code
    except TaxfreeError as error:
        return _report(error)


def _report(error: Exception) -> int:
    if _debugging():
        traceback.print_exception(error)
    told = failure(error)
    print_failure(told)
    return told.exit_code


def _debugging() -> bool:
    try:
        return Settings.from_environment().debug
    except UsageError:
        return False


def _stop_writing() -> int:
    """End quietly when the reader of stdout has gone, such as `head`."""
    _discard_output()
    return ExitCode.DONE


def _give_up_what_cannot_be_printed() -> None:
    """Keep a full disk behind stdout from being reported once more."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    # The interpreter flushes stdout once more as it exits, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
