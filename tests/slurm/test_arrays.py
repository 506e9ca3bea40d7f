"""Arrays, heterogeneous jobs and requeued jobs on the real cluster: a run in each part of a job, each by itself."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from tests.slurm.jobs import SERVE, UP, Event, Jobs, Run, await_files, role, sh, touch, until


def parts(array: Run, *tasks: int) -> list[Run]:
    """The runs of an array's tasks."""
    return [Run(array.jobs, array.jobid, array.base, _found=[array.base / f"{array.jobid}_{task}"]) for task in tasks]


def accounted(run: Run, code: int) -> None:
    """Wait for accounting's finished rows of all steps, under the ids that their agents told: they have the codes that
    the engine saw."""
    told = {rank["step"]: rank["returncode"] for rank in run.receipt()["ranks"]}

    def ended() -> dict[str, str]:
        rows = run.jobs.cluster.sacct(run.jobid)
        found = {step: rows[step][1] for step in told if step in rows and rows[step][0] != "RUNNING"}
        return found if len(found) == len(told) else {}

    assert run.until(ended, f"rows of {sorted(told)}") == {step: f"{seen}:0" for step, seen in told.items()}
    assert set(told.values()) == {code}


def proven(run: Run, name: str, code: int) -> None:
    """`allocctl verify` seals the run with this code, and nothing in accounting disagrees."""
    verified = run.jobs.allocctl("verify", name)
    assert verified.returncode == code, verified.stdout + verified.stderr
    sealed = run.receipt("receipt.json")
    assert (sealed["verdict"]["final"], sealed["verdict"]["code"], sealed["disagreements"]) == (True, code, [])


def test_every_task_of_an_array_is_a_run_of_its_own(jobs: Jobs) -> None:
    """Two at a time, in one base directory, under names that are the same for none: the last task's raw id is the
    array's own."""
    sibling = '"$ALLOCD_RUN_DIR/../${SLURM_ARRAY_JOB_ID}_$((SLURM_ARRAY_TASK_ID ^ 1))/up.1"'
    work = f'{UP}; until [ -e {sibling} ]; do sleep 0.05; done; [ "$SLURM_ARRAY_TASK_ID" != 1 ] || exit 7'
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, sh(work))}, coordinator=1, nodes=2)
    array = jobs.submit(plan, "--array=0-3%2", nodes=2)
    runs = parts(array, 0, 1, 2, 3)
    for task, run in enumerate(runs):
        run.until((run.directory / "receipt.run.json").exists, f"the end of task {task}", 60)
    assert sorted(path.name for path in array.base.iterdir()) == [f"{array.jobid}_{task}" for task in range(4)]
    for task, run in enumerate(runs):
        name, code = f"{array.jobid}_{task}", 7 if task == 1 else 0
        receipt = run.receipt()
        assert (receipt["run_id"], receipt["jobid"], receipt["verdict"]["code"]) == (name, name, code)
        assert receipt["marker"]["path"] == str(run.directory / f".bench_done.{name}")
        assert (run.file(f".bench_done.{name}") or "").startswith(f"{code}\nattempt={name}\n")
        assert receipt["time_limit"], "the end of the task's time was not known"
        assert receipt["notes"] == []
        assert run.file("ended.0") is not None, "the worker was not stopped in order"
        accounted(run, code)
        proven(run, name, code)
        run.wait_gone()
    raw = {run.receipt()["ranks"][0]["step"].split(".")[0] for run in runs}
    assert len(raw) == 4
    assert runs[3].receipt()["ranks"][0]["step"].startswith(f"{array.jobid}."), "the last task has the array's id"


def test_a_plain_job_that_a_task_submitted_is_not_that_task(jobs: Jobs) -> None:
    plan = jobs.plan({"client": role(0, sh("exit 0"))}, coordinator=0, nodes=1)
    inherited = "export SLURM_ARRAY_JOB_ID=1000000 SLURM_ARRAY_TASK_ID=3"
    run = jobs.submit(plan, nodes=1, before=inherited)
    assert run.first("RunOpened")["jobid"] == str(run.jobid)
    assert run.job_end()["ExitCode"] == "0:0"
    assert run.receipt()["notes"] == [
        f"SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID are another job's: this is {run.jobid}"
    ]


HET = (":", "--nodes=2")
"""The second component."""


@pytest.mark.parametrize("code", [0, 6], ids=["success", "a worker fails"])
def test_a_heterogeneous_job_has_its_ranks_on_all_components(jobs: Jobs, code: int) -> None:
    """The coordinator on component 0, workers on component 1. Accounting counts the workers' steps to component 1's own
    job; what the agents tell agrees with it."""
    fails = sh(f"{UP}; {await_files('up', 0, 1)}; exit 6")
    roles = {
        "client": role(
            0, sh(f"trap '{touch('ended')}; exit 0' TERM; {UP}; {await_files('up', 1, 2)}; sleep {9 * code} & wait")
        ),
        "server": role(1, SERVE),
        "worker": role(2, fails if code else SERVE),
    }
    run = jobs.submit(jobs.plan(roles, coordinator=0, nodes=3), *HET, nodes=1)
    state = run.job_end(limit=60)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED" if code else "COMPLETED", f"{code}:0")
    receipt = run.receipt()
    opened = run.first("RunOpened")
    assert (receipt["run_id"], len(set(opened["nodes"]))) == (str(run.jobid), 3)
    assert [rank["step"].split(".")[0] for rank in receipt["ranks"]] == [
        str(run.jobid),
        str(run.jobid + 1),
        str(run.jobid + 1),
    ]
    assert receipt["time_limit"]
    accounted(run, code)
    proven(run, str(run.jobid), code)
    assert run.file("ended.1") is not None
    if code:
        assert (receipt["first_failure"]["rank"], receipt["first_failure"]["code"]) == (2, 6)
        assert run.file("ended.0") is not None
        failed = run.first("RankEnded", rank=2)
        assert seconds_between(failed, run.first("StopRank")) < 0.05
        assert max(seconds_between(failed, run.first("RankEnded", rank=rank)) for rank in (0, 1)) < 0.5
    run.wait_gone()


def seconds_between(first: Event, second: Event) -> float:
    """The time between two lines of a journal."""
    return (datetime.fromisoformat(second["utc"]) - datetime.fromisoformat(first["utc"])).total_seconds()


def test_ranks_without_agents_are_stopped_in_order_on_every_component(jobs: Jobs) -> None:
    serve = {"agent": "off"}
    ready = sh(f"{UP}; {await_files('up', 1, 2)}; exit 0")
    roles = {"client": role(0, ready, **serve), "server": role("1-2", SERVE, **serve)}
    run = jobs.submit(jobs.plan(roles, coordinator=0, nodes=3), *HET, nodes=1)
    state = run.job_end(limit=60)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0")
    assert run.file("ended.1") is not None
    assert run.file("ended.2") is not None
    assert [note for note in run.receipt()["notes"] if "did not reach" in note] == []
    run.wait_gone()


def test_a_requeued_job_has_a_second_run_and_the_first_is_left_as_it_was(jobs: Jobs) -> None:
    """`scontrol requeue` in the middle, of four kinds of job at once: the first run ends its ranks in order and leaves
    its receipt; the second attempt has a directory of its own. `lost`: the batch script has lost SLURM_RESTART_COUNT,
    and the run that is there tells that this may be a further attempt."""
    again = f'{UP}; echo "in $ALLOCD_RUN_ID"; case $ALLOCD_RUN_ID in *.r1) exit 0;; esac; sleep 100 & wait $!'
    roles = {"client": role(0, sh(again), grace=1), "server": role(1, SERVE, grace=1)}
    plan = jobs.plan(roles, coordinator=0, nodes=2)
    runs = {
        "plain": jobs.submit(plan, "--requeue", nodes=2),
        "task": jobs.submit(plan, "--requeue", "--array=3", nodes=2),
        "het": jobs.submit(plan, "--requeue", ":", "--nodes=1", nodes=1),
        "lost": jobs.submit(plan, "--requeue", nodes=2, before="unset SLURM_RESTART_COUNT"),
    }
    names = {kind: f"{run.jobid}_3" if kind == "task" else str(run.jobid) for kind, run in runs.items()}
    for run in runs.values():
        run.wait_file("up.0", "up.1", limit=60)
    for name in names.values():
        jobs.cluster.run(["scontrol", "requeue", name], check=True)
    before = {}
    for kind, run in runs.items():
        run.wait_file("receipt.run.json")
        before[kind] = files(run.directory)
    for kind, run in runs.items():
        name = names[kind]
        second = Run(jobs, run.jobid, run.base, _found=[run.base / f"{name}.r1"])
        until((second.directory / "receipt.run.json").exists, f"the second attempt of {kind}", 60, run)
        assert sorted(path.name for path in run.base.iterdir()) == [name, f"{name}.r1"]
        assert files(run.directory) == before[kind]
        verdict = run.receipt()["verdict"]
        assert (verdict["outcome"], verdict["final"]) == ("failure", False)
        assert run.file("ended.1") is not None
        assert (run.log(0, "out"), second.log(0, "out")) == (f"in {name}\n", f"in {name}.r1\n")
        receipt = second.receipt()
        assert (receipt["run_id"], receipt["jobid"], receipt["notes"]) == (f"{name}.r1", name, [])
        assert receipt["verdict"]["code"] == 0
        assert (second.file(f".bench_done.{name}") or "").startswith(f"0\nattempt={name}.r1\n")
        second.wait_gone()


def files(directory: Path) -> dict[str, bytes]:
    """Every file of a run, with its content."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
