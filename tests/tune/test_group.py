"""A worker group: which failures of a task it outlives."""

from __future__ import annotations

import pytest

from tests.ranks import start_group
from tests.taxfree.fault_tasks import fail, fail_differently


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered",
        "HIP error: unspecified launch failure",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
def test_a_drivers_error_on_all_ranks_ends_it_and_other_errors_do_not(said):
    """Such an error stays with the processes: whatever they tried next would fail."""
    from taxfree_tune.workers.group import TaskFailed

    with start_group(1, "host") as group:
        with pytest.raises(TaskFailed, match="RuntimeError: no"):
            group.call(fail, 60, message="no")
        assert group.is_alive
        with pytest.raises(TaskFailed, match="a GPU or its driver fails") as caught:
            group.call(fail, 60, message=said)
        assert caught.value.exit_code == 3
        assert not group.is_alive


class TestTheCause:
    """What is told where ranks fail differently."""

    @pytest.mark.parametrize(
        ("raised", "told"),
        [
            ({0: ("echo", 0.0), 1: ("timeout", 0.5), 2: ("echo", 0.0)}, (1, 5)),
            ({0: ("timeout", 0.0), 1: ("driver", 0.5), 2: ("echo", 0.0)}, (1, 3)),
            ({0: ("error", 0.5), 1: None, 2: ("error", 0.0)}, (2, 1)),
        ],
        ids=["who waited, before who then gave up", "a driver", "the first, where some hang"],
    )
    def test_is_told_before_its_consequences(self, raised, told):
        from taxfree_tune.workers.group import TaskFailed

        with start_group(3, "host") as group:
            with pytest.raises(TaskFailed) as caught:
                group.call(fail_differently, 60, raised=raised)
            assert group.is_alive == (told[1] == 5)
        assert (caught.value.rank, caught.value.exit_code) == told

    def test_is_a_rank_that_a_peer_has_given_up_waiting_for(self):
        """As while a fabric opens: torch's store says neither who is missing nor why."""
        from taxfree.errors import WorkerLost

        with (
            start_group(2, "host") as group,
            pytest.raises(WorkerLost, match=r"^rank 1 did not finish fail_differently in time$"),
        ):
            group.call(fail_differently, 60, raised={0: ("store", 0.0), 1: None})


@pytest.mark.parametrize(
    ("rank", "world_size", "gpus", "expected"),
    [
        (0, 1, 1, ("cpu:gloo,cuda:nccl", 0)),
        (1, 2, 2, ("cpu:gloo,cuda:nccl", 1)),
        (2, 4, 8, ("cpu:gloo,cuda:nccl", 2)),
        (3, 4, 2, ("gloo", 1)),
        (7, 8, 1, ("gloo", 0)),
    ],
)
def test_ranks_have_a_gpu_each_and_nccl_or_share_and_do_without(rank, world_size, gpus, expected):
    from taxfree_tune.workers.worker import _backend_and_gpu

    assert _backend_and_gpu(rank, world_size, gpus) == expected
