"""A worker group: which failures of a task it outlives."""

from __future__ import annotations

import pytest

from tests.ranks import start_group

FAIL = "tests.taxfree.fault_tasks:fail"


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
    from taxfree.group import TaskFailed

    with start_group(1, "host") as group:
        with pytest.raises(TaskFailed, match="RuntimeError: no"):
            group.call(FAIL, 60, message="no")
        assert group.is_alive
        with pytest.raises(TaskFailed, match="a GPU or its driver fails") as caught:
            group.call(FAIL, 60, message=said)
        assert caught.value.exit_code == 3
        assert not group.is_alive


def test_who_gave_up_waiting_is_told_before_those_that_then_gave_up_too():
    from taxfree.group import TaskFailed

    with (
        start_group(3, "host") as group,
        pytest.raises(TaskFailed, match="rank 1 waited") as caught,
    ):
        group.call("tests.taxfree.fault_tasks:give_up", 60, first=1)
    assert caught.value.rank == 1
    assert caught.value.exit_code == 5
