"""`allocctl verify` of whole arrays and heterogeneous jobs, of requeued ones and of saved text, on a real cluster."""

from __future__ import annotations

import json
import os
import shlex
import time

from supervisor.core.slurm_records import SACCT_FIELDS
from tests.slurm.jobs import ALLOCCTL, SERVE, UP, Jobs, await_files, role, sh, until
from tests.slurm.test_verify import outcome, verify


def plain(jobs: Jobs, *arguments: str) -> tuple[int, str, str]:
    """`allocctl verify` as people read it: exit code, stdout, stderr."""
    done = jobs.allocctl("verify", *arguments, timeout=90)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_an_array_of_eight_with_two_failures(jobs: Jobs) -> None:
    """Task 3 fails by its rank, task 6 by its batch script, and the others run a plan to its success."""
    client = sh("[ $SLURM_ARRAY_TASK_ID != 3 ] || exit 7")
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, client)}, coordinator=1, nodes=2)
    base = jobs.directory / "array"
    run = f"{ALLOCCTL} run --dir {shlex.quote(str(base))} {shlex.quote(str(plan))}"
    jobid = jobs.batch(f"[ $SLURM_ARRAY_TASK_ID != 6 ] || exit 9\nexec {run}", "--array=1-8%4", nodes=2)
    code, document = verify(jobs, str(jobid), "--wait")
    verdict = document["verdict"]
    assert (code, document["kind"], document["jobid"]) == (7, "job", str(jobid))
    assert document["counts"] == {"parts": 8, "success": 6, "failure": 2, "unverifiable": 0}
    assert verdict["summary"].startswith(f"6 of 8 tasks succeeded; first failure {jobid}_3: rank 1 (client) on node")
    assert (verdict["origin"], verdict["final"]) == ("native", True)
    ids = [f"{jobid}_{task}" for task in range(1, 9)]
    assert [receipt["jobid"] for receipt in document["receipts"]] == ids
    assert [receipt["run_id"] for receipt in document["receipts"]] == [*ids[:5], None, *ids[6:]]
    assert [receipt["verdict"]["code"] for receipt in document["receipts"]] == [0, 0, 7, 0, 0, 9, 0, 0]
    for name, receipt in zip(ids, document["receipts"], strict=True):
        if receipt["run"]:
            assert json.loads((base / name / "receipt.json").read_text()) == receipt
            assert (base / name / f"slurm_job_{name}_outcome.txt").read_text() == receipt["slurm"]["raw"] + "\n"
    lines = outcome(jobs.directory, jobid).splitlines()
    assert lines == [receipt["slurm"]["raw"] for receipt in document["receipts"]]
    # Once more, as people read it; what is sealed is not sealed again.
    code, out, _ = plain(jobs, str(jobid), "-M", jobs.cluster.name)
    assert code == 7
    assert out.splitlines()[-1].startswith(
        f"{jobid}: failure 7 (native): 6 of 8 tasks succeeded; first failure {jobid}_3"
    )
    # Some of the tasks, and one.
    code, document = verify(jobs, f"{jobid}_[1-2,4]")
    assert (code, document["counts"]["parts"], document["verdict"]["summary"]) == (0, 3, "3 of 3 tasks succeeded")
    assert verify(jobs, f"{jobid}_6")[0] == 9
    # By its raw id it is the same task; on another cluster it is nobody's.
    raw = document["receipts"][0]["slurm"]["raw"].partition("|")[0].removeprefix("JobId=").split()[0]
    code, document = verify(jobs, raw)
    assert (code, document["run_id"], document["jobid"]) == (0, f"{jobid}_1", f"{jobid}_1")
    assert verify(jobs, f"{jobid}_1;nowhere", "--patience", "0.5")[1]["jobid"] == f"{jobid}_1"


def test_tasks_that_were_cancelled_while_they_waited(jobs: Jobs) -> None:
    jobid = jobs.cluster.sbatch("sleep 1000", "--array=1-4%1")
    until(lambda: jobs.cluster.run(["squeue", "-h", f"-j{jobid}", "-t", "R"]).stdout, "a task to run")
    code, document = verify(jobs, str(jobid))
    assert (code, document["counts"]["unverifiable"], document["verdict"]["outcome"]) == (75, 4, "unverifiable")
    assert "still in state" in document["verdict"]["summary"]
    jobs.cluster.run(["scancel", str(jobid)], check=True)
    code, document = verify(jobs, str(jobid), "--wait")
    assert (code, document["counts"]["failure"]) == (130, 4)
    assert {receipt["verdict"]["reason"] for receipt in document["receipts"]} == {"slurm_cancelled"}
    code, document = verify(jobs, f"{jobid}_3")
    assert (code, document["slurm"]["standing"], document["slurm"]["state"].split()[0]) == (130, "settled", "CANCELLED")


def test_a_heterogeneous_job_is_judged_by_all_of_its_components(jobs: Jobs) -> None:
    cluster = jobs.cluster
    good = int(cluster.run(["sbatch", "--parsable", "-N1", "--wrap", "exit 0", ":", "-N1"], check=True).stdout)
    bad = int(cluster.run(["sbatch", "--parsable", "-N1", "--wrap", "exit 3", ":", "-N1"], check=True).stdout)
    code, document = verify(jobs, str(good), "--wait")
    assert (code, document["verdict"]["outcome"]) == (0, "success")
    assert [component["jobid"] for component in document["components"]] == [f"{good}+0", f"{good}+1"]
    assert {component["standing"] for component in document["components"]} == {"settled"}
    code, document = verify(jobs, str(bad), "--wait")
    assert (code, document["verdict"]["origin"], document["slurm"]["jobid"]) == (3, "slurm", f"{bad}+0")
    assert verify(jobs, f"{bad}+1")[0] == 3
    # The leader ends well, and another component does not.
    go = jobs.directory / "go"
    script = f"until [ -e {go} ]; do sleep 0.05; done; exit 0"
    mixed = int(cluster.run(["sbatch", "--parsable", "-N1", "--wrap", script, ":", "-N1"], check=True).stdout)
    cluster.wait_state(mixed, "RUNNING")
    cluster.run(["scancel", f"{mixed}+1"], check=True)
    assert verify(jobs, str(mixed))[1]["components"][0]["standing"] == "running"
    go.touch()
    code, other = verify(jobs, str(mixed), "--wait")
    assert (code, other["verdict"]["reason"], other["slurm"]["jobid"]) == (130, "slurm_cancelled", f"{mixed}+1")
    assert [component["code"] for component in other["components"]] == [0, 130]
    # Replay derives all of it again, and notices a component that was changed.
    path = jobs.directory / "het.json"
    path.write_text(json.dumps(document))
    assert plain(jobs, "--replay", str(path))[0] == 3
    for answer in document["components"][1]["answers"]:
        answer["stdout"] = answer["stdout"].replace("FAILED", "TIMEOUT")
    path.write_text(json.dumps(document))
    code, out, _ = plain(jobs, "--replay", str(path))
    assert code == 75 and "DISAGREES" in out


def test_a_run_in_a_heterogeneous_job_is_sealed_with_all_components(jobs: Jobs) -> None:
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, sh("exit 0"))}, coordinator=1, nodes=2)
    base = jobs.directory / "het"
    run = f"exec {ALLOCCTL} run --dir {shlex.quote(str(base))} {shlex.quote(str(plan))}"
    argv = ["sbatch", "--parsable", "-N1", "--wrap", run, ":", "-N1"]
    jobid = jobs.cluster.run(argv, env=jobs.env, cwd=jobs.directory, check=True).stdout.strip()
    code, document = verify(jobs, jobid, "--wait")
    assert (code, document["run_id"], len(document["components"])) == (0, jobid, 2), document
    assert json.loads((base / jobid / "receipt.json").read_text()) == document
    assert [rank["node"] for rank in document["run"]["ranks"]] == document["run"]["nodes"]


def test_a_requeued_job_is_judged_by_its_last_attempt(jobs: Jobs) -> None:
    client = sh(f"{UP}; {await_files('go', 1)}")
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, client)}, coordinator=1, nodes=2)
    run = jobs.submit(plan, "--requeue", nodes=2)
    run.wait_file("up.1")
    jobs.cluster.run(["scontrol", "requeue", str(run.jobid)], check=True)
    first = run.directory
    second = run.base / f"{run.jobid}.r1"
    until(second.joinpath("journal.jsonl").exists, f"{second}", 60)
    until(second.joinpath("up.1").exists, "the second attempt")
    code, document = verify(jobs, str(run.jobid))  # the job lives, whatever the first attempt's end was
    assert (code, document["slurm"]["standing"]) == (75, "running")
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    (second / "go.1").touch()
    code, document = verify(jobs, str(run.jobid), "--wait")
    assert (code, document["run_id"]) == (0, f"{run.jobid}.r1"), document
    assert (second / "receipt.json").exists()
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == before
    assert not (first / "receipt.json").exists()


def saved(jobs: Jobs, jobid: int) -> dict[str, str]:
    """Texts of a job as people save them: their files by a name for each form."""
    commands = {
        "own": ["sacct", "-P", "-D", f"-j{jobid}", f"-o{','.join(SACCT_FIELDS)}"],
        "default": ["sacct", "-P", f"-j{jobid}"],
        "long": ["scontrol", "show", "job", str(jobid)],
        "line": ["scontrol", "-o", "show", "job", str(jobid)],
    }
    files = {name: jobs.directory / f"{jobid}-{name}.txt" for name in commands}
    for name, argv in commands.items():
        files[name].write_text(jobs.cluster.run(argv, check=True).stdout)
    return {name: str(path) for name, path in files.items()}


def test_saved_text_is_judged_as_the_cluster_is(jobs: Jobs) -> None:
    cluster = jobs.cluster
    jobid = cluster.sbatch("srun true; exit 5")
    lying = cluster.sbatch("exit 6", "--job-name=x ExitCode=0:0 y")
    for job in (jobid, lying):
        cluster.wait_state(job, "FAILED")
        # A young row has another name and no partition, and is refused for that.
        until(lambda job=job: "|main|" in cluster.run(["sacct", "-P", f"-j{job}"]).stdout, "its whole record")  # type: ignore[misc]
    texts, lies = saved(jobs, jobid), saved(jobs, lying)
    for pair in (("own", "long"), ("own", "line"), ("long", "line"), ("default", "long")):
        code, document = verify(jobs, "--from-files", *(texts[name] for name in pair), str(jobid))
        assert (code, document["verdict"]["origin"], document["run"]) == (5, "slurm", None), document["evidence"]
        assert len(document["evidence"]) == 2
    # One reading, made at once; and a file's time that is yet to come makes it no older.
    assert verify(jobs, "--from-files", texts["own"], str(jobid))[0] == 75
    os.utime(texts["own"], (time.time() + 3600,) * 2)
    assert verify(jobs, "--from-files", texts["own"], str(jobid))[0] == 75
    # In one line a name can imitate Slurm's fields, in many it cannot.
    code, document = verify(jobs, "--from-files", lies["own"], lies["line"], str(lying))
    assert code == 75 and "ExitCode= twice" in " ".join(document["evidence"])
    assert verify(jobs, "--from-files", lies["own"], lies["long"], str(lying))[0] == 6
    assert list(jobs.directory.glob("slurm_job_*")) == []
    assert verify(jobs, "--outcome", "--from-files", lies["own"], lies["long"], str(lying))[0] == 6
    assert outcome(jobs.directory, lying).startswith(f"{lying}|FAILED|6:0|")
