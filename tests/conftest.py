"""What tests of more than one room share.

Kernels are interpreted in these tests; what compiles them does so in processes of its own. That is
set here because Triton decides it when a kernel is defined, and any test may be the first to
import one. They have one thread: those of torch and NumPy would spin on cores that other processes
of the tests need.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from tests.forked_workers import Forks
from tests.sample import ALL, REST, Sample, split, turns_of

if TYPE_CHECKING:
    from tests.ranks import Ranks

os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")

gc.disable()  # until all is imported: two of sixteen seconds that each process spends on that


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        default=f"{datetime.now(UTC):%Y-%m-%d}",
        metavar="DATE",
        help=f"of long lists take this date's part, or {REST}DATE, or {ALL}; default: today's part",
    )
    parser.addoption(
        "--part", default="1/1", metavar="I/N", help="of what is selected, the I-th of N parts"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        Sample.of_test(config.option.sample, "")
    except ValueError as error:
        raise pytest.UsageError(f"--sample: {error}") from None
    try:
        split([], config.option.part)
    except ValueError as error:
        raise pytest.UsageError(f"--part: {error}") from None


def pytest_report_header(config: pytest.Config) -> str:
    return f"of long lists: --sample {config.option.sample}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Deal the tests that are marked `dealt`. Marks come before the selection by marks.

    Tests that may take long, which have a timeout of their own, begin first, so that all workers
    end at about the same time.
    """
    dealt = {item: turn for item in items if (turn := _dealt(item)) is not None}
    for item in items:
        if item in dealt or "sample" in getattr(item, "fixturenames", ()):
            item.add_marker("sampled")
    taken = turns_of(config.option.sample, dealt.values())
    dropped = [item for item, turn in dealt.items() if turn not in taken]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dealt or dealt[item] in taken]
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    yield
    items[:], others = split(items, config.option.part)
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """What is imported stays: collections need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _dealt(item: pytest.Item) -> tuple[str, tuple[str, ...]] | None:
    """A test that is marked `dealt`, and the values that it has of its dealt parameters."""
    if (mark := item.get_closest_marker("dealt")) is None:
        return None
    # A part by the date of what is dealt by the date would leave some combinations out for ever.
    assert isinstance(item, pytest.Function)
    assert "sample" not in item.fixturenames
    return item.nodeid.partition("[")[0], tuple(str(item.callspec.params[n]) for n in mark.args)


@pytest.fixture
def no_library_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with tables of their own: of the library's paths only the baseline is known."""
    monkeypatch.setattr("taxfree._runtime.library.evidence", lambda: ())


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Sample:
    """What the test takes of its lists in this run."""
    return Sample.of_test(request.config.option.sample, request.node.nodeid)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Worker groups that tests start themselves fork the ranks of the host fabric."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taxfree_tune.workers.process.Popen", forks)
        yield
    forks.close()


@pytest.fixture(scope="session", autouse=True)
def compilers_are_not_nice() -> Iterator[None]:
    """Beside other tests they would hardly run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("taxfree_check.cross_compile.screen.NICENESS", 0)
        yield


@pytest.fixture(scope="session")
def started() -> Iterator[dict[str, Ranks]]:
    """Worker groups by fabric, for all tests of the session."""
    from tests.ranks import Ranks

    found = {fabric: Ranks(fabric) for fabric in ("host", "cuda")}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.fixture
def fabric(request: pytest.FixtureRequest) -> str:
    """The fabric that a test runs on; see `on_every_fabric`."""
    return getattr(request, "param", "host")


@pytest.fixture
def ranks(started: dict[str, Ranks], fabric: str) -> Ranks:
    """Worker groups of the test's fabric, one per world size."""
    return started[fabric]
