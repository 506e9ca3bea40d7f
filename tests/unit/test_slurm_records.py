"""What sacct, scontrol and squeue print, read by those who must not be lied to.

The texts are what Slurm 22.05 printed, unless a test says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.slurm import ExitCode, Unreadable
from supervisor.core.slurm_queue import parse_squeue_steps, squeue_steps_argv
from supervisor.core.slurm_records import (
    parse_sacct,
    parse_sacct_ids,
    parse_scontrol,
    sacct_argv,
    scontrol_argv,
    share_sacct,
)

# --- sacct ---


def row(
    jobid: str = "7",
    state: str = "COMPLETED",
    code: str = "0:0",
    derived: str = "0:0",
    display: str = "",
    submit: str = "1000",
    start: str = "1001",
    end: str = "1002",
) -> str:
    fields = (jobid, state, code, derived, display or jobid, submit, start, end, "ann", "c", "node[1-2]")
    return "|".join(fields)


def test_the_query_asks_for_nothing_that_people_write() -> None:
    argv = sacct_argv(["7", "8_1"], "east")
    assert argv[0] == "sacct" and "--jobs=7,8_1" in argv and "--clusters=east" in argv
    assert "--allocations" not in argv and "--allocations" in sacct_argv(["7"], steps=False)
    assert "--duplicates" in argv and "--parsable2" in argv
    assert {"--starttime=1970-01-01", "--endtime=2100-01-01"} <= set(argv)
    fields = next(a for a in argv if a.startswith("--format=")).removeprefix("--format=").split(",")
    assert fields[:3] == ["JobIDRaw", "State", "ExitCode"]
    written_by_people = {"JobName", "Comment", "AdminComment", "SystemComment", "WorkDir", "SubmitLine"}
    assert not written_by_people & set(fields)


def test_a_row_with_its_steps() -> None:
    text = (
        "2|FAILED|7:0|3:0|2|1796070518|1796070518|1796070519|root|ccc|node1\n"
        "2.batch|FAILED|7:0||2.batch|1796070518|1796070518|1796070519||ccc|node1\n"
        "2.0|FAILED|3:0||2.0|1796070518|1796070518|1796070519||ccc|node1\n"
    )
    known = parse_sacct(text, "2")
    record = known.record
    assert record is not None
    assert (record.state.word, record.exit, record.derived) == ("FAILED", ExitCode(7, 0), ExitCode(3, 0))
    assert (record.submit, record.end, record.nodes) == (1796070518.0, 1796070519.0, ("node1",))
    assert record.terminal and record.raw.startswith("2|FAILED|7:0|")
    assert [(s.step, str(s.exit), s.terminal) for s in known.steps] == [("2.batch", "7:0", True), ("2.0", "3:0", True)]


def test_a_step_of_a_lost_node_has_no_code_and_spoils_nothing() -> None:
    text = (
        "5|NODE_FAIL|0:0|0:0|5|1796082039|1796082039|1796082069|root|c1|node4\n"
        "5.batch|CANCELLED|||5.batch|1796082039|1796082039|1796082069||c1|node4\n"
    )
    known = parse_sacct(text, "5")
    assert known.record is not None and known.record.state.word == "NODE_FAIL"
    assert [(s.step, s.exit, s.terminal) for s in known.steps] == [("5.batch", None, True)]
    with pytest.raises(Unreadable, match="CODE:SIGNAL"):
        parse_sacct("5|NODE_FAIL||0:0|5|1|1|1|root|c1|node4\n", "5")


def test_other_jobs_rows_are_not_ours() -> None:
    assert parse_sacct(row("71") + "\n" + row("71.0") + "\n", "7").record is None
    assert parse_sacct("", "7").record is None
    assert parse_sacct("\n", "7").incarnations == 0


def test_the_latest_incarnation_counts_whatever_the_order() -> None:
    old = [row(state="NODE_FAIL", submit="1000", start="1001"), row("7.0", derived="", start="1001")]
    new = [row(submit="2000", start="2100", end="2200"), row("7.1", derived="", start="2100")]
    for lines in (old + new, new + old):
        known = parse_sacct("\n".join(lines), "7")
        assert known.record is not None and known.record.state.word == "COMPLETED"
        assert [s.step for s in known.steps] == ["7.1"]
        assert known.incarnations == 2


def test_an_incarnation_that_has_not_started_is_the_latest() -> None:
    lines = [row(state="PENDING", start="Unknown", end="Unknown"), row(state="PREEMPTED")]
    known = parse_sacct("\n".join(lines), "7")
    assert known.record is not None and known.record.state.word == "PENDING"


def test_array_tasks_and_components_are_found_by_their_display_id() -> None:
    text = "\n".join([row("15", "FAILED", "1:0", display="12_1"), row("12", display="12_2")])
    first, second, raw = (parse_sacct(text, j).record for j in ("12_1", "12_2", "15"))
    assert first is not None and first.jobid == "15" and first == raw
    assert second is not None and second.jobid == "12"
    component = parse_sacct(row("14", display="13+1"), "13+1").record
    assert component is not None and component.jobid == "14"


def test_a_task_without_a_row_is_read_from_the_row_that_stands_for_it() -> None:
    text = "\n".join(
        [row("15", "COMPLETED", display="12_1"), row("12", "CANCELLED by 0", display="12_[1-4%2]", start="None")]
    )
    first, third = (parse_sacct(text, j).record for j in ("12_1", "12_3"))
    assert first is not None and (first.state.word, first.stands_for) == ("COMPLETED", "")  # its own row wins
    assert third is not None and third.terminal
    assert (third.jobid, third.display, third.stands_for) == ("12", "12_3", "12_[1-4%2]")
    assert parse_sacct(text, "12_5").record is parse_sacct(text, "1_3").record is None
    shares = share_sacct(text, ["12_1", "12_3", "12_5", "15"])
    assert [share.count("\n") for share in shares.values()] == [2, 1, 0, 1]
    for jobid, share in shares.items():
        assert parse_sacct(share, jobid) == parse_sacct(text, jobid)
    assert parse_sacct_ids(text) == ("12_1", "12_[1-4%2]")


def test_a_row_without_its_partition_is_young() -> None:
    # Seen for four seconds after a short array: its last task under the array's own id, as if it were a job.
    records = [parse_sacct(row() + end, "7").record for end in ("", "|main", "|")]
    assert [record is not None and record.young for record in records] == [False, False, True]


def test_a_state_without_its_end_is_not_finished() -> None:
    # Seen after slurmdbd came back: FAILED|0:0 with End Unknown, seconds later FAILED|4:0.
    text = row(state="FAILED", end="Unknown") + "\n" + row("7.0", derived="", end="Unknown")
    known = parse_sacct(text, "7")
    record = known.record
    assert record is not None and record.state.terminal and not record.terminal
    assert "without an end" in record.words
    assert not known.steps[0].terminal


@pytest.mark.parametrize(
    "line",
    [
        row() + "|main|x",
        row().rpartition("|")[0],
        "JobState=COMPLETED ExitCode=0:0",
        "7 COMPLETED 0:0",
        row(jobid="7x"),
        row(code="0"),
        row(code=""),
        row().replace("node[1-2]", "node[1-"),
        "x" * 3000,
    ],
)
def test_a_line_of_another_shape_spoils_the_answer(line: str) -> None:
    with pytest.raises(Unreadable):
        parse_sacct(row() + "\n" + line + "\n", "7")


# --- scontrol ---

SHOWN = """\
JobId={jobid} JobName={name}
   UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=root QOS=normal
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=7:0
   RunTime=00:00:01 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=1796070518 EligibleTime=1796070518
   AccrueTime=1796070518
   StartTime=1796070518 EndTime=1796070519 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=1796070518 Scheduler=Main
   Partition=p AllocNode:Sid=localhost:3153
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[1-2]
   BatchHost=node1
   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=(null)
   WorkDir=/home/ann
   Comment={comment}
   StdErr=/home/ann/2.out
   StdIn=/dev/null
   StdOut=/home/ann/2.out
   Power=

"""


def shown(name: str = "wrap", comment: str = "none", jobid: str = "2") -> str:
    return SHOWN.format(name=name, comment=comment, jobid=jobid)


def test_scontrols_fields() -> None:
    record = parse_scontrol(shown(), "2")
    assert (record.state.word, record.exit, record.derived) == ("FAILED", ExitCode(7, 0), None)
    assert (record.submit, record.start, record.end) == (1796070518.0, 1796070518.0, 1796070519.0)
    assert (record.nodes, record.batch_host, record.time_limit) == (("node1", "node2"), "node1", 3600.0)
    assert (record.restarts, record.user, record.uid, record.jobid) == (2, "ann", 1000, "2")
    assert record.raw.startswith("JobId=2 ") and "JobState=FAILED" in record.raw and "\n" not in record.raw


def test_the_batch_script_counts_where_one_line_tells_it() -> None:
    line = "   Command=/runs/a b/submit-1/job.sh"
    assert parse_scontrol(shown(), "2").command == ""
    assert parse_scontrol(shown().replace("   Command=(null)", line), "2").command == "/runs/a b/submit-1/job.sh"
    assert parse_scontrol(shown(comment=f"x\n{line}"), "2").command == ""


@pytest.mark.parametrize(
    "lines",
    [
        "   DerivedExitCode=0:0 ExitCode=7:0",
        "   ExitCode=7:0 DerivedExitCode=0:0",
        "   Requeue=1 DerivedExitCode=0:0 Restarts=2 ExitCode=7:0",
        "   Requeue=1 ExitCode=7:0 Restarts=2 DerivedExitCode=0:0",
        "   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=7:0\n   DerivedExitCode=0:0",
    ],
)
def test_the_derived_code_is_never_the_jobs(lines: str) -> None:
    text = shown().replace("   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=7:0", lines)
    record = parse_scontrol(text, "2")
    assert (record.exit, record.derived) == (ExitCode(7, 0), ExitCode(0, 0))


@pytest.mark.parametrize("text", ["a|COMPLETED|0:0 ExitCode=0:0 JobState=COMPLETED", "   ExitCode=0:0", "JobId=3"])
def test_a_name_or_comment_on_one_line_changes_nothing(text: str) -> None:
    plain = parse_scontrol(shown(), "2")
    assert replace(parse_scontrol(shown(name=text), "2"), name=plain.name) == plain
    assert parse_scontrol(shown(comment=text), "2") == plain


@pytest.mark.parametrize(
    "text",
    [
        "x\n   JobState=COMPLETED Reason=None Dependency=(null)",
        "x\n   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0",
        "x\n   StartTime=1 EndTime=9999999999 Deadline=N/A",
        "x\n\nJobId=3 JobName=y",
        "x\n   NodeList=node9",
    ],
)
def test_imitated_lines_spoil_the_answer(text: str) -> None:
    for forged in (shown(name=text), shown(comment=text)):
        with pytest.raises(Unreadable, match="imitates"):
            parse_scontrol(forged, "2")


def test_a_whole_imitated_record_before_the_real_one_is_refused() -> None:
    fake = shown().replace("FAILED", "COMPLETED").replace("7:0", "0:0").removeprefix("JobId=2 JobName=")
    with pytest.raises(Unreadable, match="imitates"):
        parse_scontrol(shown(name=fake), "2")
    with pytest.raises(Unreadable, match="imitates"):
        parse_scontrol(shown(name=fake + "\n\nJobId=9 JobName=z"), "2")


PIECES = ["\n", "   ", "JobState=COMPLETED ", "ExitCode=0:0 ", "JobId=2 ", "JobName=", "EndTime=1", "|", "\r"]
FREE = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)


@given(FREE, FREE)
def test_no_text_changes_what_slurm_says(name: str, comment: str) -> None:
    try:
        record = parse_scontrol(shown(name, comment), "2")
    except Unreadable:
        return
    assert (record.state.word, record.exit, record.end) == ("FAILED", ExitCode(7, 0), 1796070519.0)


def test_a_users_name_may_hold_spaces() -> None:
    text = shown().replace("UserId=ann(1000)", "UserId=DOMAIN\\Ann Example(1000)")
    record = parse_scontrol(text, "2")
    assert (record.user, record.uid) == ("DOMAIN\\Ann Example", 1000)


def test_array_tasks_and_components_from_scontrol() -> None:
    task = shown().replace("JobId=2 JobName", "JobId=15 ArrayJobId=12 ArrayTaskId=1 JobName")
    assert parse_scontrol(task, "12_1").jobid == parse_scontrol(task, "15").jobid == "15"
    assert parse_scontrol(task, "15").display == "12_1"
    throttled = task.replace("ArrayTaskId=1 ", "ArrayTaskId=1 ArrayTaskThrottle=2 ")
    assert parse_scontrol(throttled, "12_1").display == "12_1"
    first_lines = "JobId=14 HetJobId=13 HetJobOffset=1 JobName=wrap\n   HetJobIdSet=13-14\n"
    part = shown().replace("JobId=2 JobName=wrap\n", first_lines)
    assert parse_scontrol(part, "13+1").jobid == "14"
    with pytest.raises(Unreadable, match="several"):
        parse_scontrol(task + task, "12")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No jobs in the system\n",
        "JobId=2\n",
        shown(jobid="3"),
        shown().replace("JobState=", "State="),
        shown().replace(" ExitCode=7:0", ""),
        shown().replace("ExitCode=7:0", "ExitCode=7"),
        shown().replace("NodeList=node[1-2]", "NodeList=node[1-"),
        "banner\n" + shown(),
    ],
)
def test_what_is_no_record_of_the_job_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_scontrol(text, "2")


def test_a_running_job_without_a_limit() -> None:
    text = shown().replace("EndTime=1796070519", "EndTime=Unknown")
    text = text.replace("JobState=FAILED", "JobState=RUNNING").replace("NodeList=node[1-2]", "NodeList=")
    text = text.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED")
    record = parse_scontrol(text, "2")
    assert (record.end, record.time_limit, record.nodes, record.terminal) == (None, None, (), False)


def test_scontrol_and_squeue_queries() -> None:
    assert scontrol_argv("2") == ["scontrol", "show", "job", "2"]
    assert scontrol_argv("2", "east") == ["scontrol", "--clusters=east", "show", "job", "2"]
    assert squeue_steps_argv("2")[1:] == ["--steps", "--noheader", "--jobs=2", "--format=%i|%j"]


# --- steps ---


def test_steps_by_name() -> None:
    text = "17.0|a|b\n17.1|plain\n17.batch|batch\n12_1.0|task\n"
    assert parse_squeue_steps(text) == {"a|b": "17.0", "plain": "17.1", "batch": "17.batch", "task": "12_1.0"}


def test_a_name_borne_twice_is_nobodys() -> None:
    assert parse_squeue_steps("17.0|x\n17.1|y\n17.2|x\n") == {"y": "17.1"}
    assert parse_squeue_steps("") == {}
