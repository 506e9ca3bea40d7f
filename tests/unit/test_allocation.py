"""Which allocation a process is in: the ids, the components, and variables that are another job's."""

from __future__ import annotations

import pytest

from supervisor.core.allocation import Component, allocation_from, environment_in, variables_of
from supervisor.core.attempt import attempt_id, display_id

PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
TASK = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}
HET = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[4-5]",
}


def test_a_plain_job() -> None:
    found = allocation_from(PLAIN)
    assert (found.jobid, found.raw, found.attempt, found.restarts) == ("7", "7", "7", 0)
    assert found.components == (Component("7", ("n1", "n2")),)
    assert not found.heterogeneous
    assert found.records == ("7",)


@pytest.mark.parametrize("raw", ["5", "7"], ids=["the last task has the array's id", "any other has its own"])
def test_a_task_of_an_array_is_called_by_array_and_task(raw: str) -> None:
    found = allocation_from({**PLAIN, **TASK, "SLURM_JOB_ID": raw, "SLURM_RESTART_COUNT": "1"})
    assert (found.jobid, found.raw, found.attempt, found.records) == ("5_0", raw, "5_0.r1", ("5_0",))
    assert found.components == (Component(raw, ("n1", "n2")),)


def test_a_heterogeneous_job_is_called_by_its_leader_and_has_the_nodes_of_all_components() -> None:
    found = allocation_from(HET)
    assert (found.jobid, found.raw, found.attempt) == ("7", "7", "7")
    assert found.components == (Component("7", ("n1",)), Component("8", ("n4", "n5")))
    assert found.nodes == ("n1", "n4", "n5")
    assert found.records == ("7+0", "7+1")


def test_components_of_another_job_are_not_ours() -> None:
    found = allocation_from({**HET, **PLAIN, "SLURM_JOB_ID": "9"})
    assert (found.components, found.records) == ((Component("9", ("n1", "n2")),), ("9",))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "no allocation"),
        ({"SLURM_JOB_ID": "7"}, "no SLURM_JOB_NODELIST"),
        ({**PLAIN, "SLURM_JOB_ID": "-7"}, "no allocation"),
        ({**PLAIN, "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST cannot be read: malformed"),
        ({**PLAIN, "SLURM_RESTART_COUNT": "../1"}, "SLURM_RESTART_COUNT cannot be read"),
        ({**HET, "SLURM_JOB_ID_HET_GROUP_1": ""}, "not every SLURM_JOB_ID_HET_GROUP_N is a job's id"),
        ({**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": "n["}, "SLURM_JOB_NODELIST_HET_GROUP_1 cannot be read"),
        ({**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": ""}, "no allocation"),
    ],
)
def test_variables_that_describe_no_allocation(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        allocation_from(environ)


def test_the_older_name_of_the_list_of_nodes() -> None:
    assert allocation_from({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n3"}).nodes == ("n3",)


@pytest.mark.parametrize(
    ("environ", "jobid"),
    [
        ({}, None),
        (TASK, None),
        ({**PLAIN, **TASK}, "5_0"),
        ({**PLAIN, **TASK, "SLURM_ARRAY_TASK_ID": ""}, "7"),
        ({**PLAIN, **TASK, "SLURM_ARRAY_JOB_ID": "../5"}, "7"),
        (HET, "7"),
    ],
)
def test_the_id_that_a_job_is_called_by(environ: dict[str, str], jobid: str | None) -> None:
    assert display_id(environ) == jobid


def test_an_attempt_is_numbered_from_the_first_requeue_on() -> None:
    assert [attempt_id("5_0", text) for text in ("", "0", "1", "12")] == ["5_0", "5_0", "5_0.r1", "5_0.r12"]


@pytest.mark.parametrize(
    "environ", [PLAIN, {**PLAIN, **TASK, "SLURM_RESTART_COUNT": "2"}, HET], ids=["plain", "task", "heterogeneous"]
)
def test_the_variables_of_an_allocation_tell_of_it_again(environ: dict[str, str]) -> None:
    allocation = allocation_from(environ)
    assert allocation_from(variables_of(allocation)) == allocation


def test_from_outside_nothing_of_another_job_comes_along() -> None:
    elsewhere = {**HET, **TASK, "SLURM_CONF": "/c", "SLURM_CLUSTER_NAME": "other", "PATH": "/bin"}
    found = environment_in(allocation_from(PLAIN), elsewhere)
    assert found == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_JOBID": "7", **PLAIN}
