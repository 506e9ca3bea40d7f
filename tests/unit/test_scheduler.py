"""The Slurm client against real processes (small scripts on PATH), and verification against a clock of its own."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from supervisor.core.answers import Answer, read_answer
from supervisor.core.slurm import Source
from supervisor.core.truth import Truth
from supervisor.scheduler.client import SlurmClient
from supervisor.scheduler.verify import KEPT, Pace, verify_job

SHOWN = """\
JobId=7 JobName=x
   UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   SubmitTime=1000 EligibleTime=1000
   StartTime=1001 EndTime=1002 Deadline=N/A
   NodeList=node[1-2]
   BatchHost=node1
"""
ROW = "7|{state}|{code}|0:0|7|1000|1001|{end}|ann|c|node[1-2]\n"


# --- the client ---

Script = Callable[[str, str], None]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(name: str, body: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return write


def client(
    tmp_path: Path, *, deadline: float = 20.0, max_output: int = 100_000, cluster: str | None = None
) -> SlurmClient:
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SQUEUE_PARTITION": "p", "SLURM_CONF": "/c"}
    now = datetime(2026, 11, 30, 20, 28, 38, tzinfo=UTC)
    return SlurmClient(environ=environ, deadline=deadline, max_output=max_output, cluster=cluster, now=lambda: now)


async def test_a_record_from_each_book(tmp_path: Path, script: Script) -> None:
    (tmp_path / "row").write_text(ROW.format(state="FAILED", code="4:0", end="1002"))
    (tmp_path / "shown").write_text(SHOWN.format(state="FAILED", code="4:0"))
    script("sacct", f'exec cat "{tmp_path}/row"')
    script("scontrol", f'exec cat "{tmp_path}/shown"')
    slurm = client(tmp_path)
    book, live = await slurm.sacct("7"), await slurm.show_job("7")
    assert book.record is not None and book.record.exit.code == 4
    assert live.record is not None and live.record.nodes == ("node1", "node2") and live.record.end == 1002.0
    assert book.at == live.at == "2026-11-30T20:28:38.000+00:00"
    assert "--jobs=7" in book.argv and live.argv == ("scontrol", "show", "job", "7")


async def test_commands_get_plain_arguments_and_a_clean_environment(tmp_path: Path, script: Script) -> None:
    for name in ("sacct", "scontrol", "squeue", "scancel"):
        script(name, f'printf "%s\\n" "$@" >"{tmp_path}/{name}.args"; env >"{tmp_path}/{name}.env"')
    slurm = client(tmp_path, cluster="east")
    await slurm.sacct("7_1")
    await slurm.show_job("7+1")
    assert await slurm.steps_by_name("7") == {}
    assert await slurm.signal_step("7.0", "TERM")
    for name in ("sacct", "scontrol", "squeue", "scancel"):
        environ = (tmp_path / f"{name}.env").read_text().splitlines()
        assert {"LC_ALL=C", "SLURM_TIME_FORMAT=%s", "SLURM_CONF=/c"} <= set(environ)
        assert not [line for line in environ if line.startswith("SQUEUE_")]
        assert "--clusters=east" in (tmp_path / f"{name}.args").read_text().splitlines()
    assert (tmp_path / "scancel.args").read_text().splitlines()[-2:] == ["--signal=TERM", "7.0"]


async def test_absence_is_an_answer_and_refusal_is_none(tmp_path: Path, script: Script) -> None:
    script("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    script("sacct", "true")
    script("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    slurm = client(tmp_path)
    assert (await slurm.show_job("7")).outcome == (await slurm.sacct("7")).outcome == "absent"
    assert await slurm.steps_by_name("7") == {}
    script("scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    script("sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    script("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert (await slurm.show_job("7")).outcome == (await slurm.sacct("7")).outcome == "failed"
    assert await slurm.steps_by_name("7") is None


async def test_a_task_that_its_array_has_no_more_is_absent(tmp_path: Path, script: Script) -> None:
    """As scontrol says it of a task that was cancelled before it began."""
    script("scontrol", "echo 'Job 7_3 not found'; exit 1")
    assert (await client(tmp_path).show_job("7_3")).outcome == "absent"


async def test_steps_by_name(tmp_path: Path, script: Script) -> None:
    script("squeue", "printf '7.0|allocd-x-0\\n7.batch|batch\\n'")
    assert await client(tmp_path).steps_by_name("7") == {"allocd-x-0": "7.0", "batch": "7.batch"}


async def test_a_missing_command_is_a_failure_to_ask(tmp_path: Path) -> None:
    slurm = SlurmClient(environ={"PATH": str(tmp_path)})
    answer = await slurm.sacct("7")
    assert answer.outcome == "failed" and "cannot be started" in answer.problem and answer.returncode is None
    assert await slurm.steps_by_name("7") is None
    assert not await slurm.signal_step("7.0", "TERM")
    assert slurm.errors == slurm.calls == {"sacct": 1, "squeue": 1, "scancel": 1}


async def test_a_command_that_fails_is_counted(tmp_path: Path, script: Script) -> None:
    script("squeue", 'test "$1" != --fail || exit 1')
    slurm = client(tmp_path)
    for argument in ("--fail", "--work"):
        await slurm.run(["squeue", argument])
    assert (slurm.calls, slurm.errors) == ({"squeue": 2}, {"squeue": 1})


def gone(pid_file: Path) -> bool:
    return not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def dies(pid_file: Path) -> bool:
    """Whether the process ends: it is no child of ours, so its end can be seen only as a zombie or by its absence."""
    try:
        descriptor = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


@pytest.mark.slow
async def test_a_silent_command_is_killed_at_its_deadline(tmp_path: Path, script: Script) -> None:
    script("sacct", f'echo $$ >"{tmp_path}/pid"; echo 7 begun; exec sleep 1000')
    answer = await client(tmp_path, deadline=0.5).sacct("7")
    assert answer.outcome == "failed" and "within 0.5 s" in answer.problem and answer.returncode is None
    assert gone(tmp_path / "pid")


@pytest.mark.slow
async def test_a_wrapper_dies_with_what_it_wraps(tmp_path: Path, script: Script) -> None:
    script("sacct", f'sleep 1000 & echo $! >"{tmp_path}/pid"; wait')
    answer = await client(tmp_path, deadline=0.5).sacct("7")
    assert "within 0.5 s" in answer.problem
    assert await asyncio.to_thread(dies, tmp_path / "pid")


async def test_a_talkative_command_is_cut_off(tmp_path: Path, script: Script) -> None:
    script("sacct", f'echo $$ >"{tmp_path}/pid"; exec yes')
    answer = await client(tmp_path).sacct("7")
    assert answer.outcome == "failed" and "more than 100000 bytes" in answer.problem
    assert len(answer.stdout) <= 100_001
    assert gone(tmp_path / "pid")


async def test_a_cancelled_question_leaves_no_process(tmp_path: Path, script: Script) -> None:
    os.mkfifo(tmp_path / "begun")
    script("sacct", f'echo $$ >"{tmp_path}/begun"; exec sleep 1000')
    task = asyncio.create_task(client(tmp_path).sacct("7"))
    pid = (await asyncio.to_thread((tmp_path / "begun").read_text)).strip()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (tmp_path / "pid").write_text(pid)
    assert gone(tmp_path / "pid")


async def test_bytes_that_are_no_text_stay_visible(tmp_path: Path, script: Script) -> None:
    script("sacct", "printf '7\\377|x\\n'")
    answer = await client(tmp_path).sacct("7")
    assert answer.outcome == "failed" and answer.stdout == "7\\xff|x\n"


@pytest.mark.parametrize("jobid", ["", "-1", "7;x", "7 8", "--all"])
async def test_malformed_ids_never_become_arguments(tmp_path: Path, jobid: str) -> None:
    slurm = client(tmp_path)
    for ask in (slurm.sacct, slurm.show_job, slurm.steps_by_name):
        with pytest.raises(ValueError, match="no Slurm job id"):
            await ask(jobid)


async def test_only_steps_are_signalled(tmp_path: Path) -> None:
    slurm = client(tmp_path)
    for step in ("7", "7.batch", "7.extern"):
        with pytest.raises(ValueError, match="no step"):
            await slurm.signal_step(step, "TERM")
    with pytest.raises(ValueError, match="signal"):
        await slurm.signal_step("7.0", "TERM --user=ann")


# --- verification ---


def asked(source: Source, stdout: str = "", stderr: str = "", returncode: int = 0) -> Answer:
    return read_answer(
        source=source, jobid="7", argv=[source], at="", returncode=returncode, stdout=stdout, stderr=stderr
    )


def book(state: str, code: str = "0:0", end: str = "1002", display: str = "7") -> Answer:
    row = ROW.format(state=state, code=code, end=end).replace("|0:0|7|", f"|0:0|{display}|")
    return asked("sacct", row)


def live(state: str, code: str = "0:0") -> Answer:
    return asked("scontrol", SHOWN.format(state=state, code=code))


NO_ROW = asked("sacct")
NO_JOB = asked("scontrol", stderr="slurm_load_jobs error: Invalid job id specified", returncode=1)
BOOK_DOWN = asked("sacct", stderr="Connection refused", returncode=1)
LIVE_DOWN = asked("scontrol", stderr="Unable to contact slurm controller", returncode=1)


class Scripted:
    """A client whose answers are written down, the last one repeated, and a clock that only sleeping moves."""

    def __init__(self, sacct: list[Answer], scontrol: list[Answer], cost: float = 0.01) -> None:
        self._sacct, self._scontrol = self._repeat(sacct), self._repeat(scontrol)
        self.calls: list[str] = []
        self.now = 100.0
        self.pauses: list[float] = []
        self._cost = cost

    @staticmethod
    def _repeat(answers: list[Answer]) -> Iterator[Answer]:
        yield from answers
        while True:
            yield answers[-1]

    async def sacct(self, jobid: str) -> Answer:
        self.calls.append(f"sacct {jobid}")
        self.now += self._cost
        return next(self._sacct)

    async def show_job(self, jobid: str) -> Answer:
        self.calls.append(f"scontrol {jobid}")
        self.now += self._cost
        return next(self._scontrol)

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.pauses.append(seconds)
        self.now += seconds

    async def verify(self, wait: bool, timeout: float = 30.0, limit: float | None = None) -> Truth:  # noqa: ASYNC109
        return await verify_job(
            self, "7", wait, timeout, limit=limit, clock=lambda: self.now, sleep=self.sleep, jitter=lambda: 0.5
        )


async def test_two_books_that_agree_need_no_second_round() -> None:
    slurm = Scripted([book("COMPLETED")], [live("COMPLETED")])
    assert (await slurm.verify(False)).succeeded
    assert slurm.calls == ["sacct 7", "scontrol 7"] and not slurm.pauses


async def test_one_book_is_read_twice_with_a_pause() -> None:
    slurm = Scripted([book("FAILED", "4:0")], [NO_JOB])
    assert (await slurm.verify(False)).code == 4
    assert len(slurm.pauses) == 1 and slurm.calls.count("sacct 7") == 2


async def test_late_accounting_is_replaced_by_the_controller() -> None:
    truth = await Scripted([NO_ROW], [live("FAILED", "137:0")]).verify(False)
    assert (truth.code, truth.source) == (137, "scontrol")


async def test_a_row_that_is_corrected_is_read_again() -> None:
    truth = await Scripted([book("FAILED", "0:0"), book("FAILED", "4:0")], [live("FAILED", "4:0")]).verify(False)
    assert (truth.standing, truth.code) == ("settled", 4)


async def test_books_that_keep_differing_are_unverifiable_in_bounded_time() -> None:
    slurm = Scripted([book("COMPLETED")], [live("FAILED", "4:0")])
    truth = await slurm.verify(False, timeout=30.0)
    assert (truth.standing, truth.code) == ("differs", 75)
    assert 130.0 <= slurm.now < 131.0
    assert len(slurm.calls) <= 2 * 14


async def test_absence_is_believed_after_repeated_answers_only() -> None:
    slurm = Scripted([NO_ROW], [NO_JOB])
    truth = await slurm.verify(False, timeout=30.0)
    assert truth.standing == "absent"
    assert Pace().absence <= slurm.now - 100.0 < 30.0
    assert slurm.calls.count("sacct 7") >= Pace().absence_rounds


async def test_a_failed_query_begins_the_count_of_absences_again() -> None:
    slurm = Scripted([NO_ROW] * 4 + [BOOK_DOWN, NO_ROW], [NO_JOB])
    assert (await slurm.verify(False, timeout=1000.0)).standing == "absent"
    failed_at = 100.0 + sum(slurm.pauses[:4])
    assert slurm.now - failed_at >= Pace().absence
    slurm = Scripted([NO_ROW], [LIVE_DOWN])
    assert (await slurm.verify(False, timeout=30.0)).standing == "unasked"


async def test_a_record_that_comes_late_still_counts() -> None:
    slurm = Scripted([NO_ROW, NO_ROW, NO_ROW, book("COMPLETED")], [NO_JOB])
    assert (await slurm.verify(False)).succeeded


async def test_a_living_job_is_told_at_once() -> None:
    slurm = Scripted([book("RUNNING", end="Unknown")], [live("RUNNING")])
    truth = await slurm.verify(False)
    assert truth.standing == "running" and "RUNNING" in str(truth.doubt) and not slurm.pauses


async def test_waiting_asks_the_controller_alone_until_the_end() -> None:
    running = [live("PENDING")] + [live("RUNNING")] * 200
    slurm = Scripted([NO_ROW, book("FAILED", "9:0")], [*running, live("FAILED", "137:0")])
    truth = await slurm.verify(True, timeout=5.0)
    assert truth.code == 137 and truth.source == "sacct"
    assert slurm.calls.count("sacct 7") == 2
    assert slurm.now - 100.0 > 5.0 * 100
    assert max(slurm.pauses) == Pace().longest
    assert len(truth.answers) <= KEPT


async def test_waiting_through_the_tidying_up() -> None:
    slurm = Scripted(
        [book("RUNNING", end="Unknown"), book("COMPLETED")], [live("RUNNING"), live("COMPLETING"), live("COMPLETING")]
    )
    assert (await slurm.verify(True)).succeeded


async def test_waiting_has_a_limit_of_its_own() -> None:
    slurm = Scripted([NO_ROW], [live("RUNNING")])
    assert (await slurm.verify(True, limit=60.0)).standing == "running"
    assert 160.0 <= slurm.now < 161.0


async def test_silence_while_waiting_uses_up_the_patience() -> None:
    slurm = Scripted([NO_ROW, BOOK_DOWN], [live("RUNNING")] * 10 + [LIVE_DOWN])
    truth = await slurm.verify(True, timeout=30.0)
    assert truth.standing == "unasked" and "could not be asked since" in str(truth.doubt)
    assert slurm.pauses[-1] <= Pace().longest


async def test_an_end_seen_once_is_kept_through_a_long_silence() -> None:
    slurm = Scripted([book("FAILED", "4:0")] + [BOOK_DOWN] * 40 + [book("FAILED", "4:0")], [LIVE_DOWN])
    truth = await slurm.verify(False, timeout=1000.0)
    assert (truth.standing, truth.code) == ("settled", 4)


async def test_one_task_of_an_array_is_asked_for_by_its_own_name() -> None:
    slurm = Scripted([book("COMPLETED", display="5_3")], [NO_JOB])
    truth = await slurm.verify(False)
    assert truth.succeeded and "scontrol 5_3" in slurm.calls
    pending = Scripted([book("PENDING", end="Unknown", display="5_[3-9]")], [live("PENDING")])
    assert (await pending.verify(False)).standing == "running"
    assert pending.calls == ["sacct 7", "scontrol 7"]


async def test_a_whole_array_is_no_question_for_patience() -> None:
    slurm = Scripted([book("COMPLETED", display="7_3")], [NO_JOB])
    truth = await slurm.verify(True)
    assert truth.standing == "several" and "7_3" in str(truth.doubt) and not slurm.pauses


# --- many jobs in one call ---


QUEUED = "{job}|{job}|RUNNING|1000|1001|1602|1000|0|None|"


async def test_one_squeue_tells_of_many_jobs(tmp_path: Path, script: Script) -> None:
    rows = [
        QUEUED.format(job="7"),
        "9|8_3|PENDING|1000|N/A|N/A|1000|2|ReqNodeNotAvail, UnavailableNodes:n[1-2]|x|",
        "11|10+1|CANCELLED by 0|1000|1001|1002|1000|0|None|",
    ]
    (tmp_path / "rows").write_text("\n".join(["CLUSTER: east", *rows, ""]))
    script("squeue", f'printf "%s\\n" "$@" >"{tmp_path}/args"; exec cat "{tmp_path}/rows"')
    slurm = client(tmp_path, cluster="east")
    answer = await slurm.queue(["7", "8_3", "10+1", "99", "7"])
    assert answer.problem == "" and set(answer.rows) == {"7", "8_3", "10+1"}
    pending = answer.rows["8_3"]
    assert (pending.jobid, pending.state.word, pending.restarts, pending.start) == ("9", "PENDING", 2, None)
    assert pending.reason == "ReqNodeNotAvail, UnavailableNodes:n[1-2]|x"
    assert (answer.rows["7"].uid, answer.rows["7"].end, answer.rows["7"].reason) == (1000, 1602.0, "")
    assert answer.rows["10+1"].state.terminal
    assert {"--jobs=7,8_3,10+1,99", "--clusters=east"} <= set((tmp_path / "args").read_text().splitlines())
    assert (answer.stdout, answer.at) == ((tmp_path / "rows").read_text(), "2026-11-30T20:28:38.000+00:00")
    assert slurm.calls == {"squeue": 1}


async def test_a_squeue_that_fails_says_nothing_about_the_jobs(tmp_path: Path, script: Script) -> None:
    slurm = client(tmp_path)
    script("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert (await slurm.queue(["7"])).problem == ""
    script("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    answer = await slurm.queue(["7"])
    assert "Unable to contact" in answer.problem and answer.returncode == 1 and not answer.rows
    script("squeue", f"echo '{QUEUED.format(job='7')}'; echo '8|8|RUNNING'")
    answer = await slurm.queue(["7", "8"])
    assert "another shape" in answer.problem and not answer.rows
    script("squeue", f"echo '{QUEUED.format(job='7')}'; echo '{QUEUED.format(job='7')}'")
    assert (await slurm.queue(["7"])).rows == {}  # which of the two is meant cannot be known
    with pytest.raises(ValueError, match="no Slurm job id"):
        await slurm.queue(["7", "8;x"])


async def test_one_sacct_gives_each_job_an_answer_that_reads_again_to_itself(tmp_path: Path, script: Script) -> None:
    text = (
        ROW.format(state="FAILED", code="4:0", end="1002")
        + "7.batch|FAILED|4:0||7.batch|1000|1001|1002||c|node1\n"
        + "9|COMPLETED|0:0|0:0|8_3|1000|1001|1002|ann|c|node1\n"
        + "9.0|COMPLETED|0:0||8_3.0|1000|1001|1002||c|node1\n"
        + "8|RUNNING|0:0|0:0|8_4|1000|1001|Unknown|ann|c|node1\n"
        + ROW.format(state="COMPLETED", code="0:0", end="1009").replace("|1000|", "|1003|")
    )
    (tmp_path / "rows").write_text(text)
    script("sacct", f'exec cat "{tmp_path}/rows"')
    slurm = client(tmp_path)
    answers = await slurm.accounting(["7", "8_3", "8_4", "99"])
    single = {jobid: await slurm.sacct(jobid) for jobid in answers}
    assert slurm.calls == {"sacct": 1 + 4}
    for jobid, answer in answers.items():
        assert (answer.outcome, answer.record, answer.steps) == (
            single[jobid].outcome,
            single[jobid].record,
            single[jobid].steps,
        )
        assert Answer.from_dict(answer.to_dict()) == answer
        assert "--jobs=7,8_3,8_4,99" in answer.argv
    assert answers["7"].record is not None and answers["7"].record.state.word == "COMPLETED"
    assert answers["7"].incarnations == 2
    assert answers["8_3"].stdout.splitlines() == text.splitlines()[2:4]
    assert answers["99"].outcome == "absent" and answers["99"].stdout == ""


async def test_a_line_that_cannot_be_read_spoils_every_answer(tmp_path: Path, script: Script) -> None:
    (tmp_path / "rows").write_text(ROW.format(state="COMPLETED", code="0:0", end="1002") + "7|COMPLETED|0:0\n")
    script("sacct", f'exec cat "{tmp_path}/rows"')
    answers = await client(tmp_path).accounting(["7", "8"])
    assert {answer.outcome for answer in answers.values()} == {"failed"}
    assert all("another shape" in answer.problem for answer in answers.values())
    assert all(Answer.from_dict(answer.to_dict()) == answer for answer in answers.values())


async def test_a_sacct_that_fails_fails_for_every_job(tmp_path: Path, script: Script) -> None:
    script("sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    answers = await client(tmp_path).accounting(["7", "8"])
    assert {(a.jobid, a.outcome, a.returncode) for a in answers.values()} == {("7", "failed", 1), ("8", "failed", 1)}
    assert await client(tmp_path).accounting([]) == {}


async def test_long_lists_are_cut_into_calls_that_an_argument_can_hold(tmp_path: Path, script: Script) -> None:
    script("squeue", "true")
    script("sacct", "true")
    slurm = client(tmp_path)
    ids = [f"4294967295_{4_000_000_000 + n}" for n in range(2500)]
    assert (await slurm.queue(ids)).problem == ""
    assert set(await slurm.accounting(ids[:500])) == set(ids[:500])
    assert slurm.calls == {"squeue": 3, "sacct": 4}  # the fourth for the row that tasks may share


async def test_a_whole_job_is_cancelled_by_its_id_alone(tmp_path: Path, script: Script) -> None:
    script("scancel", f'printf "%s\\n" "$@" >"{tmp_path}/args"')
    slurm = client(tmp_path, cluster="east")
    assert await slurm.cancel_job("7_3") == ""
    assert (tmp_path / "args").read_text().splitlines() == ["--clusters=east", "7_3"]
    script("scancel", "echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1")
    assert "Access/permission denied" in await slurm.cancel_job("7")
    for malformed in ("7.0", "7.batch"):
        with pytest.raises(ValueError, match="is a step"):
            await slurm.cancel_job(malformed)
    with pytest.raises(ValueError, match="no Slurm job id"):
        await slurm.cancel_job("--user=ann")
