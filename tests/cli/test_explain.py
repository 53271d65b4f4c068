"""`taxfree explain`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from taxfree._runtime.dispatch import Choice
from taxfree.errors import WorkerLost
from taxfree_cli import explain_views
from taxfree_cli.exits import ExitCode
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.benching.bench import ProblemResult
from taxfree_tune.measuring.bounds import Bounds, Peaks
from taxfree_tune.measuring.results import DISPATCH, Row, Skipped
from taxfree_tune.profiling.explain import Explanation, Pipeline, _explain
from taxfree_tune.profiling.program_trace import Activity
from taxfree_tune.profiling.step_timer import Span, TimedPipeline
from taxfree_tune.profiling.timeline import Timeline, chrome_trace, timelines
from taxfree_tune.reporting import pictures
from taxfree_tune.taxes import INSIDE, accounts
from taxfree_tuning_db import LookupStep
from tests.tune.pipelines import Fused, Truth

OP = "all_gather_matmul"
PROBLEM = AllGatherMatmul(m=16, n=3584, k=6144, world_size=3)
BOUNDS = Bounds(t_floor_us=14.0, t_link_us=3.0, t_gemm_us=20.2)
WIDTHS = (60, 100, 160)


def timed(truth: Truth, fused: bool) -> TimedPipeline:
    measured = truth.measurement()
    if fused:
        steps = tuple(dataclasses.replace(step, kind="fused") for step in measured.steps)
        measured = dataclasses.replace(measured, steps=steps, trace=Fused().trace())
    spans = tuple(
        Span(rank, step.name, 10.0 * index + rank, 10.0 * index + rank + 9)
        for rank in range(truth.ranks)
        for index, step in enumerate(measured.steps)
    )
    return TimedPipeline(measured, spans)


def pipeline(
    variant: str, config: dict, picked: bool, truth: Truth, fused: bool = False
) -> Pipeline:
    found = timed(truth, fused)
    return Pipeline(variant, config, picked, 3, accounts(found.measurement, BOUNDS), found)


def explanation(m: int = 16, host: float = 50.0) -> Explanation:
    return Explanation(
        op=OP,
        problem=dataclasses.asdict(dataclasses.replace(PROBLEM, m=m)),
        hardware="NVIDIA H200",
        bounds=BOUNDS,
        pipelines=(
            pipeline("baseline", {}, False, Truth(host=host, late=1.0)),
            pipeline("push", {"BLOCK_M": 16}, True, Truth(host=20.0, latency=1.0), fused=True),
        ),
        skipped=(),
        choice=Choice("exact", "push", {"BLOCK_M": 16}, "its own record"),
        lookup_trace=(LookupStep("all_gather_matmul with m=16", True, "record: user"),),
    )


def shown(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for line in explain_views.lines(explanation(), width):
            console.print(line)
    return capture.get()


class TestAccount:
    def test_every_part_has_its_time_spread_share_and_method(self):
        text = shown(160)
        for name in ("host", "gaps", "skew", "latency", "transfer", "re-layout", "matmul"):
            (line, *_) = [line for line in text.splitlines() if line.startswith(f"    {name} ")]
            assert "±" in line
            assert "%" in line
            assert len(line.split("%", 1)[1]) > 10
        for tax in ("launch", "bulk synchronous", "locality", "residual", "bound"):
            assert f"\n  {tax} " in text

    def test_the_dispatcher_is_explained(self):
        text = shown(160)
        assert "dispatch: push BLOCK_M=16" in text
        assert "dispatch picks push (exact): its own record" in text
        assert "+ all_gather_matmul with m=16: record: user" in text

    def test_fused_kernels_are_split_by_what_their_programs_recorded(self):
        text = shown(160)
        fused = text[text.index("dispatch: push") :]
        for name in ("ends", "start", "skew", "latency", "transfer", "kernel work", "unexplained"):
            assert f"\n    {name} " in fused
        assert "tracing what programs do adds" in fused

    def test_what_stays_unsplit_is_said(self):
        measured = timed(Truth(), fused=True).measurement
        (account, *_) = accounts(dataclasses.replace(measured, trace=None), BOUNDS)
        assert account.unsplit == INSIDE

    def test_what_is_no_account_shows_the_call_and_its_steps_as_timed(self):
        usual = explanation()
        library = usual.pipelines[0]
        doubted = tuple(
            dataclasses.replace(account, no_account="readings cannot be believed")
            for account in library.accounts
        )
        library = dataclasses.replace(library, accounts=doubted)
        found = dataclasses.replace(usual, pipelines=(library,))
        text = "\n".join(str(line) for line in explain_views.lines(found, 80))
        assert "no account: readings cannot be believed" in text
        assert "run it again" in text
        assert "\n  call " in text
        assert "\n    all-gather " in text
        assert "█" not in text

    def test_the_instrument_tells_how_exact_it_is(self):
        text = " ".join(shown(160).split())
        assert "a clock reading adds 1.7 us" in text
        assert "the clock moves by 0.032 us" in text

    def test_all_ranks_are_shown_by_part_where_there_is_room(self):
        wide, narrow = shown(160), shown(60)
        assert any(
            line.split()[:4] == ["rank", "eager", "host", "gaps"] for line in wide.splitlines()
        )
        assert any(line.split()[:3] == ["rank", "eager", "launch"] for line in narrow.splitlines())

    @pytest.mark.parametrize("width", [40, *WIDTHS])
    def test_it_fits_any_terminal(self, width):
        found = explain_views.lines(explanation(), width)
        assert max(len(line) for line in found if isinstance(line, Text)) <= width
        assert max(map(len, shown(width).splitlines())) <= width

    @pytest.mark.parametrize("width", WIDTHS)
    def test_bars_are_in_proportion(self, width):
        lines = shown(width).splitlines()
        launch = next(line for line in lines if line.startswith("  launch"))
        bound = next(line for line in lines if line.startswith("  bound"))
        assert launch.count("█") > bound.count("█") > 0


class OneGroup:
    """Workers that find one `timed` for each candidate."""

    def call(self, task, deadline_s, *, candidates, **_):
        self.measured = [each.variant for each in candidates]
        return [[timed(Truth(), fused=False) for _ in candidates]]


@pytest.mark.parametrize(
    ("modes", "measured"), [(["eager"], ["baseline", "registered"]), ([], ["baseline"])]
)
def test_what_dispatch_picks_is_measured_unless_it_was_wrong(modes, measured):
    picked = Choice("exact", "registered", {}, "its own record")
    config = {"variant": picked.variant}
    dispatch = [dataclasses.replace(ROW, variant=DISPATCH, config=config) for _ in modes]
    group = OneGroup()
    result = dataclasses.replace(RESULT, rows=(ROW, *dispatch), choice=picked)
    found = _explain(group, group, result)
    assert group.measured == measured
    assert [pipeline.variant for pipeline in found.pipelines] == measured


class TestSweep:
    def table(self, width: int) -> list[list[str]]:
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(explain_views.sweep([explanation(16), explanation(64)], width))
        return [line.split() for line in capture.get().splitlines()]

    def test_a_row_per_problem_and_pipeline(self):
        heading, *rows = self.table(160)
        assert heading[:5] == ["m", "variant", "eager", "launch", "bulk"]
        assert [row[:2] for row in rows] == [
            ["16", "baseline"], ["16", "push*!"], ["64", "baseline"], ["64", "push*!"],
        ]  # fmt: skip

    def test_no_account_has_no_parts(self):
        usual = explanation()
        doubted = [
            dataclasses.replace(pipeline.slowest, no_account="it differs")
            for pipeline in usual.pipelines
        ]
        pipelines = tuple(
            dataclasses.replace(pipeline, accounts=(account,))
            for pipeline, account in zip(usual.pipelines, doubted, strict=True)
        )
        console = Console(width=160, color_system=None)
        with console.capture() as capture:
            found = dataclasses.replace(usual, pipelines=pipelines)
            console.print(explain_views.sweep([found], 160))
        heading, *rows = (line.split() for line in capture.get().splitlines())
        for row in rows:
            shown = dict(zip(heading, row, strict=True))
            timed = {name for name, cell in shown.items() if cell != "-"}
            assert shown["variant"].endswith("!")
            assert timed == {"variant", "eager", "bound", "graph"}

    def test_what_fields_have_in_common_is_said_once(self):
        title = explain_views.sweep_title([explanation(16), explanation(64)])
        assert title == f"{OP} n=3584 k=6144 dtype=float16 world_size=3, NVIDIA H200, us"

    @pytest.mark.parametrize("width", [30, *WIDTHS])
    def test_columns_that_do_not_fit_are_left_out(self, width):
        table = self.table(width)
        assert max(len(" ".join(row)) for row in table) <= width
        assert table[0][2] == "eager"


TIMELINES = (
    Timeline("baseline", steps=(Span(0, "all-gather", 0.0, 9.0), Span(1, "all-gather", 1.0, 9.5))),
    Timeline(
        "push",
        activities=(
            Activity(0, 0, "send", 1, 0.0, 4.0),
            Activity(1, 3, "compute", None, 1.0, 8.0),
            Activity(1, 3, "wait", 0, 2.0, 4.5),
        ),
    ),
)


class TestTimelines:
    def test_a_trace_has_a_process_per_rank_and_a_track_per_program(self):
        events = chrome_trace(TIMELINES)["traceEvents"]
        names = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert names == ["baseline rank 0", "baseline rank 1", "push rank 0", "push rank 1"]
        slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if "ts" in e]
        assert slices == [
            (0, 0, "all-gather", 0.0, 9.0), (1, 0, "all-gather", 1.0, 8.5),
            (2, 0, "send 1", 0.0, 4.0), (3, 3, "compute", 1.0, 7.0), (3, 3, "wait 0", 2.0, 2.5),
        ]  # fmt: skip

    def test_a_call_of_a_fused_kernel_is_what_its_programs_recorded(self):
        _, push = timelines(explanation())
        assert {each.kind for each in push.activities} == {"send", "compute", "wait"}
        assert min(each.begin_us for each in push.activities) == 0.0

    def test_a_call_of_the_library_comes_from_the_middle_of_its_chain(self):
        found = explanation()
        library = dataclasses.replace(found, pipelines=found.pipelines[:1])
        spans = tuple(
            Span(rank, f"step {index % 3}", 10.0 * index, 10.0 * index + 9)
            for rank in range(3)
            for index in range(60)
        )
        (pipeline,) = library.pipelines
        timed = dataclasses.replace(pipeline.timed, spans=spans)
        pipelines = (dataclasses.replace(pipeline, timed=timed),)
        (timeline,) = timelines(dataclasses.replace(library, pipelines=pipelines))
        assert timeline.ranks == [0, 1, 2]
        assert [(step.name, step.begin_us) for step in timeline.steps[:3]] == [
            ("step 0", 0.0), ("step 1", 10.0), ("step 2", 20.0),
        ]  # fmt: skip

    def test_are_kept_as_json(self):
        for timeline in timelines(explanation()):
            kept = json.loads(json.dumps(timeline.to_json()))
            found = Timeline.from_json(kept)
            assert found.to_json() == kept
            assert (found.variant, found.ranks) == (timeline.variant, timeline.ranks)

    def test_are_drawn_on_one_axis(self, tmp_path):
        path = tmp_path / "timelines.png"
        call = {
            "op": OP, "problem": dataclasses.asdict(PROBLEM), "hardware": "NVIDIA H200",
            "timelines": [timeline.to_json() for timeline in TIMELINES],
        }  # fmt: skip
        pictures.save_timelines(call, path)
        assert path.read_bytes().startswith(b"\x89PNG")


class TestPlot:
    def test_writes_a_picture(self, tmp_path):
        path = tmp_path / "taxes.png"
        rows = [*explanation(16).rows(), *explanation(64, host=-10).rows()]
        pictures.save_taxes(rows, path)
        assert path.read_bytes().startswith(b"\x89PNG")


# -- the command --

ROW = Row(
    OP, dataclasses.asdict(PROBLEM), "baseline", {}, "eager", 9.0, 1.0, (9.0,), 2.0, 3.0, 1.0, 2.0,
    0.001, launches=3,
)  # fmt: skip
RESULT = ProblemResult(
    OP, PROBLEM, (ROW,), (), Choice("exact", "push", {}, ""), (), BOUNDS, Peaks(1.0, 1.0, 1.0),
    KNOWN["cpu"],
)  # fmt: skip


@pytest.fixture
def explained(cli, monkeypatch):
    """Run the command on made-up measurements."""

    def call(
        *arguments: object,
        found: Explanation | None = None,
        ended_by: BaseException | None = None,
    ):
        def run(*_: object):
            yield RESULT, found or explanation()
            if ended_by is not None:
                raise ended_by

        monkeypatch.setattr("taxfree_tune.profiling.explain.run", run)
        return cli("explain", "--shapes", "m=16 n=32 k=32", "--fabric", "host", *arguments)

    return call


class TestCommand:
    def test_prints_one_document(self, explained):
        outcome = explained("--json")
        document = json.loads(outcome.out)
        assert (document["schema"], outcome.code) == (1, ExitCode.DONE)
        baseline, push = document["rows"]
        assert (baseline["variant"], baseline["kernels"], baseline["rank"]) == ("baseline", 3, 2)
        taxes = ("launch_us", "bulk_synchronous_us", "locality_us", "residual_us", "t_bound_us")
        assert sum(baseline[name] for name in taxes) == pytest.approx(baseline["t_eager_us"])
        assert [rank["rank"] for rank in baseline["ranks"]] == [0, 1, 2]
        assert push["kernel_us"] + push["unexplained_us"] == pytest.approx(push["residual_us"])
        assert push["program_trace_us"] is not None
        assert "program_trace_us" not in baseline
        assert push["open"]
        assert document["dispatch"][0]["lookup_trace"][0]["why"] == "record: user"
        assert "interpreted kernels" in outcome.err

    def test_a_sweep_is_one_table(self, explained):
        outcome = explained("--sweep")
        assert "push*!" in outcome.out
        assert "skew" not in outcome.out

    def test_a_sweep_shows_reasons_as_they_are(self, explained):
        reason = "RuntimeError: [/pytorch/third_party/gloo/transport] Connection closed"
        skipped = Skipped(OP, dataclasses.asdict(PROBLEM), "push", {}, "failed", reason)
        outcome = explained("--sweep", found=dataclasses.replace(explanation(), skipped=(skipped,)))
        assert f"push: failed: {reason}" in outcome.out

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (KeyboardInterrupt(), ExitCode.INTERRUPTED),
            (WorkerLost("rank 1 died"), ExitCode.PEER_LOST),
        ],
        ids=["interrupted", "worker lost"],
    )
    def test_what_was_finished_is_shown_where_the_rest_was_not(
        self, explained, tmp_path, error, code
    ):
        picture = tmp_path / "taxes.png"
        outcome = explained("--json", "--plot", picture, ended_by=error)
        assert outcome.code == code
        document = json.loads(outcome.out)
        assert [row["variant"] for row in document["rows"]] == ["baseline", "push"]
        assert document["environment"]["fabric"] == "host"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "push*!" in explained("--sweep", ended_by=error).out

    def test_writes_traces_and_pictures(self, explained, monkeypatch, tmp_path):
        monkeypatch.setattr("taxfree_tune.profiling.timeline.timelines", lambda *_: TIMELINES)
        files = {name: tmp_path / f"{name}.out.png" for name in ("plot", "timeline")}
        trace_file = tmp_path / "trace.json"
        asked = [text for name, file in files.items() for text in (f"--{name}", file)]
        outcome = explained("--trace", trace_file, *asked)
        assert outcome.code == ExitCode.DONE
        assert json.loads(trace_file.read_text())["traceEvents"]
        assert all(file.stat().st_size > 0 for file in files.values())

    def test_timelines_are_of_one_shape(self, cli, tmp_path):
        shapes = ("--shapes", "m=16,32 n=32 k=32", "--fabric", "host")
        outcome = cli("explain", *shapes, "--trace", tmp_path / "trace.json")
        assert outcome.code == ExitCode.USAGE
        assert "of one shape, not 2" in outcome.err

    def test_a_time_below_its_bound_is_an_error(self, explained):
        impossible = Bounds(t_floor_us=500.0, t_link_us=3.0, t_gemm_us=20.0)
        found = explanation()
        below = dataclasses.replace(
            found,
            pipelines=tuple(
                dataclasses.replace(each, accounts=accounts(each.timed.measurement, impossible))
                for each in found.pipelines
            ),
        )
        outcome = explained(found=below)
        assert outcome.code == ExitCode.FAILED
        assert "baseline on m=16 n=3584 k=6144" in outcome.err
        assert "faster than its bound of 500 us" in outcome.err


class TestModel:
    SHAPE = ("--shapes", "m=16 n=3584 k=8192")

    @pytest.mark.parametrize("hardware", ["h200", "mi300x", "mi325x"])
    def test_every_line_of_an_account_says_modelled(self, cli, hardware):
        outcome = cli("explain", *self.SHAPE, "--hardware", hardware, "--variant", "registered")
        assert outcome.code == ExitCode.DONE
        accounts = [line for line in outcome.out.splitlines() if "%" in line or " us " in line]
        assert len(accounts) > 15
        assert [line for line in accounts if "modelled" not in line] == []

    def test_its_rows_say_so_too(self, cli):
        outcome = cli("explain", *self.SHAPE, "--hardware", "mi300x", "--gpus", "8", "--json")
        document = json.loads(outcome.out)
        (row,) = document["rows"]
        assert row["is_modelled"]
        assert row["problem"]["world_size"] == 8
        environment = document["environment"]
        assert environment["modelled"]
        assert environment["hardware"]["gpu"] == row["hardware"] == "AMD Instinct MI300X"
        assert document["dispatch"] == []

    def test_unknown_hardware_is_refused(self, cli):
        outcome = cli("explain", *self.SHAPE, "--hardware", "tpu")
        assert outcome.code == ExitCode.USAGE
        assert "no cost model for 'tpu'" in outcome.err

    def test_there_is_no_trace_of_a_model(self, cli, tmp_path):
        trace_file = tmp_path / "t.json"
        outcome = cli("explain", *self.SHAPE, "--hardware", "h200", "--trace", trace_file)
        assert outcome.code == ExitCode.USAGE


class TestSaved:
    """What was measured elsewhere is shown as it was there, of the problems that are asked for."""

    RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
    FILE = RESULTS / "explain" / "nvidia-h200-x8.json"
    SHAPES = ("--shapes", "m=512 n=3584 k=8192 gather_dim=1")

    @pytest.mark.parametrize("columns", [40, 80])
    def test_an_account_says_where_it_was_measured(self, cli, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = cli("explain", "--from", self.FILE, *self.SHAPES)
        assert outcome.code == 0, outcome.err
        head, _, *account = outcome.out.splitlines()
        assert head.endswith("measured on 8 x NVIDIA H200, 2026-11-22; not measured here")
        assert "132.2 us eager, 99.19 in a graph" in outcome.out
        assert "dispatch: push_tma" in outcome.out
        assert len([line for line in account if line.startswith("  bound")]) == 2
        assert max(map(len, account)) <= columns
        assert "…" not in outcome.out

    def test_what_a_file_holds_does_not_steer_the_terminal(self, cli, tmp_path):
        file = tmp_path / "hostile.json"
        file.write_text(self.FILE.read_text().replace("NVIDIA H200", r"\u001b[2JH200"))
        out = cli("explain", "--from", file, *self.SHAPES).out
        assert "\x1b" not in out
        assert r"\x1b[2JH200: bound" in out

    def test_a_sweep_has_a_row_per_pipeline(self, cli):
        out = cli("explain", "--from", self.FILE, "--sweep").out
        assert sum("baseline" in line for line in out.splitlines()) == 22

    def test_a_sweep_marks_what_is_open(self, cli):
        file = self.FILE.with_name("nvidia-h200-x4.json")
        whole, sweep = (cli("explain", "--from", file, *how).out for how in ((), ("--sweep",)))
        marked = [line for line in sweep.splitlines() if "! " in line and "no account" not in line]
        assert len(marked) == whole.count("\n  open: ") > 0

    @pytest.mark.parametrize("columns", [40, 80])
    def test_timelines_share_one_axis(self, cli, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        file = self.RESULTS / "timeline" / "nvidia-h200-x2.json"
        outcome = cli("explain", "--from", file, "--shapes", "m=64 n=3584 k=8192")
        assert outcome.code == 0, outcome.err
        _, _, *lines = outcome.out.splitlines()
        assert max(map(len, lines)) <= columns
        library, ours = (line for line in lines if line.startswith("rank 0"))
        assert list(dict.fromkeys(library[7:])) == list("▒░█")
        assert list(dict.fromkeys(ours[7:])) == list("▒█░")
        assert len(ours) < 0.75 * len(library)

    def test_a_fresh_document_is_read_back(self, cli, tmp_path):
        shape = ("--shapes", "m=16 n=3584 k=8192", "--hardware", "h200")
        (tmp_path / "modelled.json").write_text(cli("explain", *shape, "--json").out)
        saved = cli("explain", "--from", tmp_path / "modelled.json").out
        assert saved.startswith("modelled.json: modelled for 8 x NVIDIA H200")
        assert saved.partition("\n\n")[2] == cli("explain", *shape).out

    @pytest.mark.parametrize(
        ("options", "code", "error"),
        [
            (("--from", FILE, "--shapes", "m=17 n=3584 k=8192"), 1, "holds none of these problems"),
            (("--from", FILE, "--op", "flash_decode"), 1, "holds none of these problems"),
            (("--from", FILE, "--fabric", "host"), 2, "--from takes only"),
            (("--from", "none.json"), 2, "none.json cannot be read: No such file"),
            (("--from", RESULTS / "attention"), 2, "cannot be read"),
            (("--from", Path(__file__)), 2, "cannot be read as JSON"),
        ],
    )
    def test_what_it_cannot_show_is_refused(self, cli, options, code, error):
        outcome = cli("explain", *options)
        assert (outcome.code, outcome.out) == (code, "")
        assert error in outcome.err


@pytest.mark.parametrize("command", ["explain", "tune"])
def test_a_decode_step_is_among_the_names(cli, command) -> None:
    wrong = cli(command, "--op", "decode_stp", "--model", "llama-3.1-8b")
    assert wrong.code == 2
    assert "decode_step" in wrong.err


def test_no_model_is_made_for_a_step_that_keeps_no_times(cli, monkeypatch) -> None:
    monkeypatch.setattr("taxfree_tune.tuning.steps.Workers", None)
    step = ("--op", "decode_step", "--model", "llama-3.1-70b", "--gpus", 2, "--fabric", "host")
    outcome = cli("explain", *step)
    assert outcome.code == 1
    assert "interpreted kernels keep no times" in outcome.err


def test_scale_prints_modelled_calls_of_records_and_the_error(cli) -> None:
    shown = cli("explain", "--scale", "8..32", "--link", "50,5", "--op", "matmul_all_reduce",
                 "--shapes", "m=1024 n=8192 k=3584")  # fmt: skip
    assert shown.code == 0, shown.err
    assert "8 ranks modelled from fewer are" in shown.out
    rows = [line.split() for line in shown.out.splitlines() if line[:5].strip().isdigit()]
    assert [(row[0], row[-1]) for row in rows if "library" in row] == [
        ("8", "recorded"), ("16", "modelled"), ("32", "modelled"),
    ]  # fmt: skip
    assert [row[-1] for row in rows if "rail" in row or "flat" in row] == ["modelled"] * 4


def test_scale_draws_each_call(cli, tmp_path: Path) -> None:
    picture = tmp_path / "scale.svg"
    arguments = ("--op", "matmul_all_reduce", "--shapes", "m=64 n=8192 k=3584")
    shown = cli("explain", "--scale", "8..16", "--link", "50,5", *arguments, "--plot", picture)
    assert shown.code == 0, shown.err
    text = picture.read_text("utf-8")
    assert "modelled" in text
    assert all(f"{way} " in text for way in ("in a node", "flat", "rail", "library"))


def test_scale_draws_no_picture_of_many_problems(cli, tmp_path: Path) -> None:
    shown = cli("explain", "--scale", "8..16", "--plot", tmp_path / "scale.svg")
    assert shown.code == 2
    assert "too many for a picture" in shown.err
