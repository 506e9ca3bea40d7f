"""The marker on real steps: who is believed when an engine dies, when a part of a sweep failed, when a file lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.slurm.jobs import ALLOCCTL, SERVE, SLEEP, UP, Event, Jobs, Run, await_files, role, sh, touch

SOURCED = '. "$ALLOCD_SH"'


def two_ranks(jobs: Jobs, worker: list[str], client: str, **tables: Any) -> Path:
    """A plan of a worker (rank 0) and a coordinator (rank 1), which waits until the worker is up."""
    script = sh(f"{UP}; {await_files('up', 0)}; {client}")
    return jobs.plan({"engine": role(0, worker), "client": role(1, script)}, coordinator=1, nodes=2, **tables)


def by_coordinator(**options: Any) -> Event:
    return {"by": "coordinator", **options}


def marker(run: Run) -> list[str]:
    """The lines of the marker in the run directory."""
    text = run.file(f".bench_done.{run.jobid}")
    assert text is not None and text.endswith("\n")
    return text.splitlines()


# --- a sweep -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", ["allocctl", "sh"])
def test_a_failed_point_of_a_sweep_is_told_to_the_end(jobs: Jobs, note: str) -> None:
    """The second of three points fails; the third succeeds, and so do the cleanup and the script."""
    remember = f"{ALLOCCTL} marker note $code" if note == "allocctl" else "allocd_marker_note $code"
    sweep = (
        f"{SOURCED}; point() {{ [ $1 != 2 ] || return 3; }}; "
        f"for n in 1 2 3; do code=0; point $n || code=$?; {remember} || exit 99; done; {touch('clean')}"
    )
    run = jobs.submit(two_ranks(jobs, SERVE, sweep), nodes=2)
    record = run.job_end()
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "3:0"), str(run)
    assert run.first("RankEnded", rank=1)["code"] == 0
    assert run.file("clean.1") is not None and run.file("ended.0") is not None
    assert marker(run)[0] == "3"
    verdict = run.receipt()["verdict"]
    assert (verdict["code"], verdict["origin"]) == (3, "native")
    assert "noted code 3" in verdict["summary"]
    verified = run.verify()
    assert verified.returncode == 3, verified.stdout + verified.stderr


def test_a_failed_point_is_what_the_script_itself_publishes(jobs: Jobs) -> None:
    sweep = f"{SOURCED}; allocd_marker_note 3; allocd_marker_note 4; allocd_marker_publish 0"
    run = jobs.start(two_ranks(jobs, SERVE, sweep, marker=by_coordinator()), jobs.hold(nodes=2))
    assert run.wait() == 3, str(run)
    assert (marker(run)[0], "by=coordinator" in marker(run)) == ("3", True)
    assert run.file("ended.0") is not None


# --- an engine that dies because the work is done ------------------------------------------------------------------


def test_an_engine_that_dies_of_the_coordinators_end_is_judged_by_the_end(jobs: Jobs) -> None:
    """The coordinator has ended with 0, a promised file is still to come, and an engine loses its peer and dies."""
    worker = sh(f"{UP}; {await_files('measured', 1)}; {await_files('go', 0)}; exit 1")
    plan = two_ranks(jobs, worker, touch("measured"), artifacts=[{"name": "result", "path": "result.txt"}])
    run = jobs.start(plan, jobs.hold(nodes=2))
    run.first("CheckArtifacts")
    (run.directory / "go.0").touch()
    run.first("ReadMarker", asked=run.first("RankEnded", rank=0)["seq"])
    assert run.events("PublishMarker") == []
    (run.directory / "result.txt").write_text("done\n")
    assert run.wait() == 0, str(run)
    receipt = run.receipt()
    assert (receipt["verdict"]["outcome"], receipt["failures"]) == ("success", [])
    assert (receipt["ranks"][0]["end"]["code"], receipt["ranks"][0]["returncode"]) == (1, 0)
    assert marker(run)[0] == "0"


@pytest.mark.parametrize("code", [0, 7])
def test_an_engine_that_dies_before_a_scripts_marker_comes_is_judged_by_it(jobs: Jobs, code: int) -> None:
    worker = sh(f"{UP}; {await_files('measured', 1)}; exit 1")
    client = f"{SOURCED}; {touch('measured')}; sleep 1.5; allocd_marker_publish {code}; exit {code}"
    run = jobs.submit(two_ranks(jobs, worker, client, marker=by_coordinator()), nodes=2)
    record = run.job_end()
    assert record["ExitCode"] == f"{code}:0", str(run)
    died, published = run.first("RankEnded", rank=0), run.first("MarkerRead", found="marker")
    assert published["at"] - died["at"] > 1.0
    receipt = run.receipt()
    assert (receipt["verdict"]["code"], receipt["verdict"]["origin"]) == (code, "native")
    assert [failure["rank"] for failure in receipt["failures"]] == ([1] if code else [])
    assert (marker(run)[0], "by=coordinator" in marker(run)) == (str(code), True)
    assert receipt["ranks"][0]["returncode"] == code
    assert run.ended_steps(2)[0] == ("FAILED" if code else "COMPLETED", f"{code}:0")


@pytest.mark.parametrize(("ended", "code"), [(5, 5), (0, 1)])
def test_an_engine_that_dies_and_no_marker_comes_has_failed_itself(jobs: Jobs, ended: int, code: int) -> None:
    worker = sh(f"{UP}; {await_files('up', 1)}; exit {ended}")
    client = f"trap '{touch('ended')}; exit 0' TERM; {SLEEP}"
    run = jobs.start(two_ranks(jobs, worker, client, marker=by_coordinator(recheck=1)), jobs.hold(nodes=2))
    assert run.wait() == code, str(run)
    died, stop = run.first("RankEnded", rank=0), run.first("StopRank", rank=1)
    assert 1.0 <= stop["at"] - died["at"] < 4.0
    first = run.receipt()["first_failure"]
    assert (first["rank"], first["code"], first["seq"]) == (0, code, died["seq"])
    assert run.file("ended.1") is not None
    assert (marker(run)[0], "by=supervisor" in marker(run)) == (str(code), True)


def test_an_engine_that_dies_under_a_living_coordinator_has_no_second_look(jobs: Jobs) -> None:
    run = jobs.start(
        two_ranks(jobs, sh(f"{UP}; {await_files('up', 1)}; exit 5"), f"trap 'exit 0' TERM; {SLEEP}"),
        jobs.hold(nodes=2),
    )
    assert run.wait() == 5, str(run)
    assert run.first("StopRank", rank=1)["seq"] == run.first("RankEnded", rank=0)["seq"]


# --- files that lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stale", ["0\n", "0\nattempt=1.r7\n", "", "nonsense\n"], ids=["plain", "bound", "empty", "bad"]
)
def test_a_marker_of_an_earlier_attempt_is_not_believed(jobs: Jobs, stale: str) -> None:
    """At a path that the plan names: a zero that was there before would make the engine's death no failure."""
    place = jobs.directory / "bench_done"
    place.write_text(stale)
    jobs.directory.joinpath("bench_done.note").write_text("4\n")
    worker = sh(f"{UP}; {await_files('up', 1)}; exit 5")
    plan = two_ranks(jobs, worker, f"trap 'exit 0' TERM; {SLEEP}", marker=by_coordinator(path=str(place), recheck=0.2))
    run = jobs.start(plan, jobs.hold(nodes=2))
    assert run.wait() == 5, str(run)
    assert place.read_text().splitlines()[0] == "5"
    aside = place.with_name(f"bench_done.before.{run.directory.name}")
    assert aside.read_text() == stale
    assert "earlier attempt" in "".join(run.receipt()["notes"])


def test_a_marker_that_another_run_uses_is_refused(jobs: Jobs) -> None:
    allocation, place = jobs.hold(nodes=2), jobs.directory / "bench_done"
    plan = two_ranks(jobs, SERVE, await_files("go", 1), marker={"path": str(place)})
    first = jobs.start(plan, allocation)
    first.wait_file("up.1")
    second = jobs.start(plan, allocation)
    assert second.wait() == 78
    assert "used by a run that lives" in (second.base / "engine.log").read_text()
    (first.directory / "go.1").touch()
    assert first.wait() == 0, str(first)
    third = jobs.start(plan, allocation)
    third.wait_file("up.1")
    assert not place.exists()
    (third.directory / "go.1").touch()
    assert third.wait() == 0, str(third)
    assert place.read_text().splitlines()[0] == "0"


@pytest.mark.parametrize(
    "write",
    [': >"$ALLOCD_MARKER"', 'echo hello >"$ALLOCD_MARKER"', 'printf 0 >"$ALLOCD_MARKER"', 'echo 256 >"$ALLOCD_MARKER"'],
    ids=["empty", "garbage", "torn", "too large"],
)
def test_a_file_that_is_no_marker_is_replaced_when_its_writer_is_gone(jobs: Jobs, write: str) -> None:
    """The coordinator's own code is known: a file that says nothing cannot change it."""
    run = jobs.start(two_ranks(jobs, SERVE, f"{write}; exit 6", marker=by_coordinator()), jobs.hold(nodes=2))
    assert run.wait() == 6, str(run)
    assert run.receipt()["first_failure"]["rank"] == 1
    assert (marker(run)[0], f"attempt={run.directory.name}" in marker(run)) == ("6", True)
    assert run.first("MarkerPublished")["outcome"] == "written"
    assert run.file("ended.0") is not None


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("allocd_marker_publish 7; allocd_marker_publish 0; exit 0", 7, "7"),
        ("allocd_marker_publish 7; exit 9", 7, "7"),
        ("allocd_marker_publish 0; exit 4", 4, "0"),
    ],
    ids=["twice", "a failure, then another end", "a zero, then a failure"],
)
def test_the_first_marker_counts_and_a_zero_promises_nothing(jobs: Jobs, script: str, code: int, says: str) -> None:
    plan = two_ranks(jobs, SERVE, f"{SOURCED}; {script}", marker=by_coordinator())
    run = jobs.start(plan, jobs.hold(nodes=2))
    assert run.wait() == code, str(run)
    assert marker(run)[0] == says
    assert run.receipt()["verdict"]["origin"] == "native"
    assert run.file("ended.0") is not None
