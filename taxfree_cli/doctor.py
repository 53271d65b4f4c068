"""`taxfree doctor`: what is there, what is missing, what the machine does, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from taxfree.errors import HardwareError
from taxfree_cli import options
from taxfree_cli.output import messages, print_json, print_lines, results

if TYPE_CHECKING:
    from taxfree_tune.doctor.report import (
        Coherence,
        MachineReport,
        Package,
        ProbeResults,
        Rates,
        StartOrder,
    )
    from taxfree_tune.drivers.gpu import Gpu, GpuProcess

Gpus: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="COUNT",
        min=1,
        help="Ranks to measure on: all GPUs, or 2 on the host, unless given.",
    ),
]

#: a key and its value; a section has two columns
Line: TypeAlias = tuple[str, str]

_KEY_WIDTH = 14
_GIB = 1 << 30


def doctor(gpus: Gpus = None, fabric: options.Fabric = "auto", json: options.Json = False) -> None:
    """Report software, hardware, usable fabrics, measured rates and next steps."""
    from taxfree_tune.doctor import examine

    with messages().status("looking") as status:
        report = examine(fabric, gpus, tell=status.update)
    if json:
        print_json(asdict(report) | {"serves": report.serves})
    else:
        print_report(report)
    if not report.serves:
        raise HardwareError(report.reason, "see the next steps at the end of the report")


def print_report(report: MachineReport) -> None:
    """Print all of a report, section by section."""
    _print_section("Software", _software(report))
    _print_section("Machine", _machine(report))
    _print_list("Environment", (f"{n}={v}" for n, v in report.machine.environment.items()))
    _print_section("Fabrics", ((n, why or "can serve") for n, why in report.fabrics.items()))
    if report.measured is not None:
        _print_section(_measured_title(report.measured), _measured(report.measured))
    _print_section("Not found out", report.problems.items())
    _print_list("Next", report.advice)


def _print_section(title: str, lines: Iterable[Line]) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=_KEY_WIDTH, overflow="fold")
    grid.add_column(overflow="fold")
    for key, value in lines:
        grid.add_row("", Text(key, style="cyan"), Text(value))
    if not grid.row_count:
        return
    _print_title(title)
    results().print(grid)


def _print_list(title: str, lines: Iterable[str]) -> None:
    """Print a section of lines that are never broken, so that they can be copied."""
    indented = [f"  {line}" for line in lines]
    if indented:
        _print_title(title)
        print_lines(indented)


def _print_title(title: str) -> None:
    results().print(Text(f"\n{title}", style="bold"))


# -- sections --


def _software(report: MachineReport) -> Iterator[Line]:
    yield from report.software.versions.items()
    for package in report.software.packages:
        yield package.name, _package(package)
    iris = report.software.iris
    yield "iris", iris.detail if iris.state != "broken" else f"cannot be imported: {iris.detail}"


def _package(package: Package) -> str:
    installed = ", ".join(package.installed)
    if package.loaded is None:
        return f"installed ({installed}), but cannot be imported" if installed else "missing"
    if installed in (f"{package.name} {package.loaded}", f"{package.name} {_release(package)}"):
        return package.loaded
    return f"{package.loaded} loaded, {installed or 'nothing'} installed"


def _release(package: Package) -> str:
    return (package.loaded or "").partition("+")[0]


def _machine(report: MachineReport) -> Iterator[Line]:
    machine = report.machine
    yield from machine.system.items()
    if not machine.vendors:
        yield "gpus", "none: no driver of NVIDIA or AMD"
    for gpu in machine.gpus:
        yield f"gpu {gpu.index}", _gpu(gpu)
    if machine.links:
        yield "links", _links(machine.links)
    if machine.gpus:
        yield "processes", "; ".join(map(_process, machine.processes)) or "none on the GPUs"


def _gpu(gpu: Gpu) -> str:
    parts = [
        gpu.name,
        _of(gpu.used_bytes, gpu.memory_bytes, "GiB used", _GIB),
        _of(gpu.compute_mhz, gpu.compute_max_mhz, "MHz"),
        _of(gpu.memory_mhz, gpu.memory_max_mhz, "MHz memory"),
        _of(gpu.power_w, gpu.power_limit_w, "W"),
        _of(gpu.temperature_c, None, "°C"),
    ]
    if gpu.slowed_by:
        parts.append(f"slowed by {', '.join(gpu.slowed_by)}")
    return ", ".join(part for part in parts if part)


def _of(now: float | None, most: float | None, unit: str, divisor: int = 1) -> str:
    """`345 of 1980 MHz`, as far as it is known."""
    rates = [f"{rate / divisor:.0f}" for rate in (now, most) if rate is not None]
    return f"{' of '.join(rates)} {unit}" if rates else ""


def _links(links: tuple[tuple[str, ...], ...]) -> str:
    pairs = [link for row, cells in enumerate(links) for link in cells[row + 1 :]]
    counts = {link: pairs.count(link) for link in dict.fromkeys(pairs)}
    if not counts:
        return "one GPU"
    return ", ".join(
        f"{link} between {count} pair{'s' if count > 1 else ''}" for link, count in counts.items()
    )


def _process(process: GpuProcess) -> str:
    where = "" if process.gpu is None else f" on gpu {process.gpu}"
    memory = "" if process.memory_bytes is None else f" ({process.memory_bytes / _GIB:.1f} GiB)"
    return f"{process.name} {process.pid}{where}{memory}"


def _measured_title(measured: ProbeResults) -> str:
    ranks = "1 rank" if measured.world_size == 1 else f"{measured.world_size} ranks"
    return f"Measured on {ranks} of fabric {measured.fabric}"


def _measured(measured: ProbeResults) -> Iterator[Line]:
    if measured.interpreted:
        yield "interpreted", "these figures show that it works, not the speed of a GPU"
    if measured.rates is not None:
        yield "bounds", _rates(measured.rates)
    for peer in measured.peers or ():
        rates = f"push {_figure(peer.push_gb_s)}, pull {_figure(peer.pull_gb_s)} GB/s"
        yield f"to rank + {peer.distance}", rates
    if measured.coherence is not None:
        yield "coherence", _coherence(measured.coherence)
    if measured.signals:
        times = (
            f"{_figure(signal.round_trip_us)} (rank {signal.peer})" for signal in measured.signals
        )
        yield "signal", f"there and back from rank 0 in {', '.join(times)} us"
    if measured.barrier is not None:
        yield "barrier", f"{_figure(measured.barrier.eager_us)} us"
        yield "graph capture", _graph(measured.barrier.graph_us)
    if measured.order is not None:
        yield "start order", _order(measured.order)
        if measured.order.chiplets > 1:
            yield "chiplets", _chiplets(measured.order)


def _rates(rates: Rates) -> str:
    matmul, memory = _figure(rates.matmul_tflop_s), _figure(rates.memory_gb_s)
    links = "" if rates.links_gb_s is None else f", links {_figure(rates.links_gb_s)} GB/s"
    return f"bfloat16 matmul {matmul} TFLOP/s, memory {memory} GB/s{links}"


def _graph(barrier_us: float | None) -> str:
    return "no graphs" if barrier_us is None else f"works, barrier {_figure(barrier_us)} us"


def _coherence(coherence: Coherence) -> str:
    if coherence.stale_words:
        return f"{coherence.stale_words} STALE words seen after their signal"
    return f"words arrive before their signals, {coherence.rounds} rounds with each peer"


def _order(order: StartOrder) -> str:
    within = " within each chiplet" if order.chiplets > 1 else ""
    if order.largest_inversion == 0:
        return f"in order of program id{within} ({order.programs} programs)"
    verdict = "as programs that start together race" if order.is_kept else "NOT in order of id"
    return (
        f"up to {order.largest_inversion} places early{within}: {verdict} "
        f"({order.programs} programs, {order.resident} at a time)"
    )


def _chiplets(order: StartOrder) -> str:
    dealt = f"{order.programs} programs in turn to {order.chiplets} chiplets"
    if order.elsewhere:
        return f"NOT {dealt}: {order.elsewhere} run elsewhere; schedules for chiplets may be slow"
    return dealt


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
