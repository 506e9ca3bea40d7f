"""A rank is a tree of processes: whatever it started is gone when the run is over, tree and all."""

from __future__ import annotations

import os
import signal

import pytest

from tests.slurm.jobs import SERVE, SLEEP, UP, Jobs, Run, alive, await_files, py, role, sh, touch

GRACE = 0.5

IGNORES_TERM = sh(f"trap '' TERM; sleep 1000 & echo $! $$ >$ALLOCD_RUN_DIR/pids.$ALLOCD_RANK; {UP}; {SLEEP}")
"""Together with its child."""

LEAVES_A_GRANDCHILD = sh(f"""
trap '{touch("ended")}; exit 0' TERM
(trap '' TERM; sleep 1000 & echo $! >$ALLOCD_RUN_DIR/pids.$ALLOCD_RANK; {UP}; wait) &
{SLEEP}""")
"""It ends in order, and its grandchild stays: that one ignores the signal, and its own parent does."""

LEAVES_A_LATE_CHILD = sh(f"""
trap 'sh -c "$LATE" & {await_files("late", 1)}; exit 0' TERM
{UP}; {SLEEP}""")
"""Its handler starts a process that stays, and that nobody has told to end."""

LATE_CHILD = f"trap '{touch('ended')}; exit 0' TERM; {touch('late')}; {SLEEP}"

FORKS_A_DAEMON = py("""
import os, signal, time
run, rank = os.environ["ALLOCD_RUN_DIR"], os.environ["ALLOCD_RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(f"{run}/pids.{rank}", "w") as file:
        file.write(str(os.getpid()))
    open(f"{run}/up.{rank}", "w").close()
    os.execve("/bin/sleep", ["sleep", "1000"], {})
os.wait()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    signal.pause()
""")
"""It leaves the session, has no parent any more, ignores SIGTERM, and its environment is empty."""


def _pids(run: Run, *ranks: int) -> list[int]:
    """What the ranks wrote down, and that it runs."""
    run.wait_file(*(f"up.{rank}" for rank in ranks))
    found = [int(pid) for rank in ranks for pid in (run.file(f"pids.{rank}") or "").split()]
    assert all(map(alive, found)), found
    return found


def test_what_resists_the_end_is_gone_after_the_grace_tree_and_all(jobs: Jobs) -> None:
    """The coordinator leaves a daemon behind as well, and its end is no less successful for all of that."""
    client = sh(f"""
{await_files("up", 0, 1, 2)}
setsid sh -c 'trap "" TERM; echo $$ >$ALLOCD_RUN_DIR/pids.3; {UP}; exec sleep 1000' &
until [ -e $ALLOCD_RUN_DIR/end ]; do sleep 0.02; done""")
    roles = {
        "stubborn": role(0, IGNORES_TERM, grace=GRACE),
        "careless": role(1, LEAVES_A_GRANDCHILD, grace=GRACE),
        "daemon": role(2, FORKS_A_DAEMON, grace=GRACE),
        "client": role(3, client, grace=GRACE),
    }
    run = jobs.start(jobs.plan(roles, coordinator=3), jobs.hold())
    pids = _pids(run, 0, 1, 2, 3)
    assert len(pids) == 5
    (run.directory / "end").touch()
    assert run.wait() == 0, str(run)
    assert [pid for pid in pids if alive(pid)] == [] == run.processes()
    receipt = run.receipt()
    assert receipt["failures"] == [] and receipt["doubts"] == []
    assert [rank["killed"] >= 1 and rank["left"] == 0 for rank in receipt["ranks"]] == [True] * 4
    assert run.file("ended.1") is not None
    for rank in (0, 1, 2):
        stopped, gone = run.first("StopRank", rank=rank)["at"], run.first("TreeGone", rank=rank)["at"]
        assert GRACE <= gone - stopped < GRACE + 1.0
    how = {rank: run.first("RankEnded", rank=rank) for rank in range(4)}
    assert [(how[rank]["code"], how[rank]["signal"]) for rank in range(4)] == [
        (None, 9),
        (0, None),
        (0, None),
        (0, None),
    ]


def test_what_a_handler_leaves_behind_is_told_to_end_as_well(jobs: Jobs) -> None:
    """At once, for it never got the signal of the stop: it is not left to a KILL at the end of the grace."""
    late = role(1, LEAVES_A_LATE_CHILD, env={"LATE": LATE_CHILD}, grace=60)
    roles = {"late": late, "client": role(0, sh(await_files("up", 1)))}
    run = jobs.start(jobs.plan(roles, coordinator=0, nodes=2), jobs.hold(2))
    assert run.wait() == 0, str(run)
    assert run.file("ended.1") is not None
    assert run.first("TreeGone", rank=1)["killed"] == 0


@pytest.mark.parametrize("victim", ["Hello", "StepSpawned"], ids=["its agent", "its srun"])
def test_a_rank_goes_with_what_held_it_and_the_run_says_so(jobs: Jobs, victim: str) -> None:
    """KILL to the agent: the kernel ends the main process, and the search of the node finds children that left the
    session. KILL to srun: Slurm ends the step."""
    leaves = sh(f"trap '' TERM; setsid sleep 1000 & echo $! $$ >$ALLOCD_RUN_DIR/pids.$ALLOCD_RANK; {UP}; {SLEEP}")
    roles = {"server": role(0, leaves), "worker": role("1-2", SERVE), "client": role(3, SERVE)}
    run = jobs.start(jobs.plan(roles, coordinator=3), jobs.hold())
    pids = _pids(run, 0)
    run.wait_file(*(f"up.{rank}" for rank in (1, 2, 3)))
    os.kill(run.first(victim, rank=0)["pid"], signal.SIGKILL)
    assert run.wait() == 137, str(run)
    assert [pid for pid in pids if alive(pid)] == [] == run.processes()
    receipt = run.receipt()
    first = receipt["first_failure"]
    assert (first["rank"], first["what"], first["origin"], first["provisional"]) == (0, "step_lost", "allocd", True)
    assert f"its agent on {receipt['nodes'][0]} ended" in first["text"]
    assert run.first("Swept", rank=0)["left"] == 0 and receipt["doubts"] == []
    assert all(run.file(f"ended.{rank}") is not None for rank in (1, 2, 3))
