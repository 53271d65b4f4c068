"""Ranks that a launcher has started: torchrun's nodes, tasks of Slurm, and a pod per node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from taxfree.errors import HardwareError, UsageError, WorkerLost
from taxfree_cli.exits import ExitCode
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_tune import devices
from taxfree_tune.tuning import nodes as tuning_nodes
from taxfree_tune.tuning.nodes import NodeFailed, Nodes
from taxfree_tune.workers.launch import LaunchedProcess
from taxfree_tune.workers.supervisor import Supervisors
from taxfree_tuning_db import Database, TrialRecord
from tests.ranks import PYTHON, environment, wait_until_gone, workers_of

PATIENCE_S = 300.0  # of what never takes so long, unless the machine is busy
TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "RANK": "9", "WORLD_SIZE": "16"}
SLURM = {"SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}
POD = {"RANK": "1", "WORLD_SIZE": "2"}


class TestVariables:
    @pytest.mark.parametrize(
        ("variables", "launch"),
        [
            ({}, LaunchedProcess()),
            (TORCHRUN, LaunchedProcess(1, 2, 1, 8)),
            (TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}, LaunchedProcess(2, 3, 1, 8)),
            (SLURM | {"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, LaunchedProcess(1, 3, 3, 4)),
            (SLURM | {"SLURM_NODEID": "2", "SLURM_LOCALID": "0"}, LaunchedProcess(2, 3, 0, 2)),
            (SLURM | TORCHRUN, LaunchedProcess(1, 2, 1, 8)),  # torchrun as a task of Slurm
            # srun --pty bash
            ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "3"}, LaunchedProcess()),
            (POD, LaunchedProcess(1, 2)),
            ({"RANK": "1"}, LaunchedProcess()),
        ],
    )
    def test_each_launcher_is_understood(
        self, variables: dict[str, str], launch: LaunchedProcess
    ) -> None:
        assert LaunchedProcess.from_environment(variables) == launch

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"LOCAL_RANK": "0"} | POD, "LOCAL_RANK is set, and LOCAL_WORLD_SIZE is not"),
            (TORCHRUN | {"LOCAL_RANK": "8"}, "contradict each other: node 1 of 2, rank 8 of 8"),
            (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "contradict each other"),
            (POD | {"RANK": "first"}, "RANK=first is no number"),
            (SLURM | {"SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, "contradict each other"),
            (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "TASKS_PER_NODE=many makes no sense"),
        ],
    )
    def test_what_makes_no_sense_is_named(self, variables: dict[str, str], message: str) -> None:
        with pytest.raises(UsageError, match=message) as error:
            LaunchedProcess.from_environment(variables)
        assert error.value.hint


class TestSizes:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def launch(gpus: int, **variables: str) -> None:
            monkeypatch.setattr("taxfree_tune.devices.available_gpus", lambda: gpus)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)

        return launch

    def test_a_group_is_the_ranks_of_a_node(self, launched: Callable[..., None]) -> None:
        launched(8, **TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})
        assert devices.world_sizes("cuda") == (4,)
        assert devices.most_ranks("cuda") == 4
        devices.require("cuda", 2)

    def test_a_group_across_nodes_is_refused(self, launched: Callable[..., None]) -> None:
        launched(8, **TORCHRUN)
        with pytest.raises(UsageError, match="16 ranks would span nodes: this one has 8") as error:
            devices.require("cuda", 16)
        assert error.value.hint.startswith("--gpus 8: each node tunes for its own group")

    def test_so_it_is_with_a_pod_per_node(self, launched: Callable[..., None]) -> None:
        launched(8, **POD)
        assert devices.world_sizes("cuda") == (8,)
        with pytest.raises(UsageError, match="16 ranks would span nodes: this one has 8"):
            devices.require("cuda", 16)

    def test_a_launcher_may_have_started_too_few(self, launched: Callable[..., None]) -> None:
        launched(8, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", RANK="0", WORLD_SIZE="2")
        with pytest.raises(UsageError, match="4 ranks are asked for, the launcher started 2"):
            devices.require("cuda", 4)

    def test_ranks_that_see_one_gpu_each_are_refused(self, launched: Callable[..., None]) -> None:
        launched(1, **TORCHRUN)
        with pytest.raises(HardwareError, match="8 GPUs are asked for, and a rank sees 1") as error:
            devices.require("cuda", 8)
        assert "--gpus-per-node" in error.value.hint


PROBLEMS = [AllGatherMatmul(m, 32, 32, world_size=2) for m in (3, 5, 7)]
TRIAL = TrialRecord("push", {}, "measured", "", {"eager": 1.0}, 0.0, 1)


class TestNodes:
    @pytest.fixture
    def together(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
        """Runs a function on two nodes, which are threads; what each returned or raised."""
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", free_port())
        received: list[Any] = []

        def run(function: Callable[[Nodes], Any]) -> list[Any]:
            def node(number: int) -> Any:
                try:
                    with Nodes(LaunchedProcess(number, 2), received.append) as nodes:
                        return function(nodes)
                except Exception as error:
                    return error

            with ThreadPoolExecutor(2) as threads:
                return list(threads.map(node, range(2)))

        return run

    def test_they_divide_what_both_are_asked_for(self, together: Callable[..., Any]) -> None:
        shares = together(lambda nodes: nodes.share_of("H200", PROBLEMS))
        assert shares == [PROBLEMS[::2], PROBLEMS[1::2]]

    def test_other_gpus_measure_all(self, together: Callable[..., Any]) -> None:
        shares = together(lambda nodes: nodes.share_of(f"GPU {nodes._node}", PROBLEMS))
        assert shares == [PROBLEMS, PROBLEMS]

    def test_one_table_comes_out(self, together: Callable[..., Any], tmp_path: Path) -> None:
        path = tmp_path / "tuning.sqlite"
        with Database(path) as database:
            database.add_trial("old", TRIAL)

        def tune(nodes: Nodes) -> Any:
            with nodes.database(nodes.copy_of(path)) as database:
                known = len(database.trials("old"))
                if nodes._node:
                    database.add_trial("new", TRIAL)
                    nodes.send({"row": 1})
                nodes.gather()
            return known, nodes._node == 0 or database.path != path

        assert together(tune) == [(1, True), (1, True)]
        with Database(path) as database:
            assert database.trials("old") == database.trials("new") == (TRIAL,)

    def test_the_failure_of_one_ends_the_other(self, together: Callable[..., Any]) -> None:
        def fail(nodes: Nodes) -> None:
            if nodes._node:
                raise HardwareError("no GPU", "buy one")
            nodes.share_of("H200", PROBLEMS)

        first, second = together(fail)
        assert isinstance(second, HardwareError)
        assert isinstance(first, NodeFailed)
        assert (first.message, first.hint) == ("node 1 failed: no GPU", "buy one")
        assert first.exit_code == ExitCode.NO_HARDWARE

    def test_a_dead_node_is_noticed(
        self, together: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning_nodes, "LEASE_S", 0.5)

        def die(nodes: Nodes) -> None:
            if nodes._node:
                nodes._ended.set()  # its heart stops
                time.sleep(2)
            nodes.gather()

        first, _ = together(die)
        assert isinstance(first, WorkerLost)
        assert "node 1 has not answered" in first.message

    def test_the_address_of_the_first_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        monkeypatch.setenv("MASTER_PORT", "29500")
        with pytest.raises(UsageError, match="2 nodes were launched without MASTER_ADDR"):
            Nodes(LaunchedProcess(0, 2), print)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextlib.contextmanager
def running(*commands: tuple[list[str], dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Modules of Python that run with some variables, and end with the block."""
    processes = [
        subprocess.Popen(
            [PYTHON, "-W", "ignore", "-m", *command],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tune(db: Path, shapes: str, trials: int) -> list[str]:
    options = ["--fabric", "host", "--shapes", shapes, "--variant", "push", "--db", str(db)]
    return ["taxfree", "tune", *options, "--trials", str(trials), "--json"]


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return
    raise AssertionError("".join(said))


@pytest.mark.timeout(2 * PATIENCE_S)
def test_two_nodes_of_torchrun_make_one_table(tmp_path: Path) -> None:
    db, port = tmp_path / "tuning.sqlite", free_port()
    agent = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", port]
    command = ["-m", *tune(db, "3,5x32x32", 1)]
    nodes = [([*agent, "--node-rank", str(node), *command], {}) for node in range(2)]
    with running(*nodes) as (first, second):
        out, err = first.communicate(timeout=PATIENCE_S)
        other_out, other_err = second.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (0, 0), err + other_err
    assert other_out == ""
    rows = json.loads(out)["rows"]
    assert sorted((row["problem"]["m"], row["node"]) for row in rows) == [(3, 0), (5, 1)]
    with Database(db, read_only=True) as database:
        records = list(database.records())
        assert sorted(record.problem["m"] for record in records) == [3, 5]
        assert all(database.trials(record.key) for record in records)
    assert {path.name for path in tmp_path.iterdir()} == {"tuning.sqlite"}


@pytest.mark.timeout(2 * PATIENCE_S)
def test_tasks_of_slurm_replace_a_worker_and_end_together(tmp_path: Path) -> None:
    db, command = tmp_path / "tuning.sqlite", tune(tmp_path / "tuning.sqlite", "5x32x32", 1000)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_JOB_ID": free_port(), "SLURM_STEP_ID": "0"}
    tasks = [(command, step | {"SLURM_LOCALID": str(task)}) for task in range(2)]
    with running(*tasks) as processes:
        first, second = processes
        read_until(first, "tuning")
        (killed,) = workers_of(second.pid)  # which the task has started, not the first one
        os.kill(killed, signal.SIGKILL)
        while not (workers := [pid for pid in workers_of(second.pid) if pid != killed]):
            assert first.poll() is None, first.communicate()
            time.sleep(0.1)
        workers += workers_of(first.pid)
        first.terminate()
        while second.poll() is None:  # at whatever moment of its end the signal comes
            second.terminate()
            time.sleep(0.001)
        said = [process.communicate(timeout=PATIENCE_S) for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [ExitCode.INTERRUPTED, ExitCode.INTERRUPTED], said
    assert said[1] == ("", "")
    assert wait_until_gone(workers, 30) == []
    with Database(db, read_only=True) as database:
        assert database._connection.select("SELECT key FROM trials")


def test_a_task_ends_with_the_first_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": free_port()}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    controller = Supervisors(LaunchedProcess(0, 1, 0, 2))
    with pytest.raises(UsageError, match="another process is rank 0 of this node"):
        Supervisors(LaunchedProcess(0, 1, 0, 2))
    with running((["taxfree", "shapes"], step | {"LOCAL_RANK": "1"})) as (task,):
        process = controller.of(1)
        controller._listener.close()
        process._connection.close()  # as the system does when the controller dies
        out, err = task.communicate(timeout=PATIENCE_S)
    assert (task.returncode, out) == (ExitCode.PEER_LOST, "")
    assert err.startswith("error: rank 1: the first rank of this node has died\n")
