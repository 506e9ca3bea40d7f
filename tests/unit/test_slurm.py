"""Slurm's words: states, exit codes, ids, hostlists, times, and the variables that steps inherit."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.slurm import (
    STATES,
    ExitCode,
    JobId,
    Source,
    Unreadable,
    agrees,
    compress_hostlist,
    expand_hostlist,
    parse_duration,
    parse_exit_code,
    parse_job_id,
    parse_state,
    parse_submitted,
    parse_time,
    query_environment,
    step_environment,
)

# --- states ---

WAITS, RUNS, ENDS, OVER = "waiting", "running", "ending", "ended"

TABLE: list[tuple[str, str, str, int | None, bool]] = [
    # word, short code, phase, code of allocctl (None: the record's own), whether it may be queued again
    # squeue(1) and sacct(1)
    ("BOOT_FAIL", "BF", OVER, 1, True),
    ("CANCELLED", "CA", OVER, 130, False),
    ("COMPLETED", "CD", OVER, None, False),
    ("DEADLINE", "DL", OVER, 124, False),
    ("FAILED", "F", OVER, None, False),
    ("NODE_FAIL", "NF", OVER, 1, True),
    ("OUT_OF_MEMORY", "OOM", OVER, 1, False),
    ("PENDING", "PD", WAITS, None, False),
    ("PREEMPTED", "PR", OVER, 1, True),
    ("RUNNING", "R", RUNS, None, False),
    ("REQUEUED", "RQ", WAITS, None, False),
    ("RESIZING", "RS", RUNS, None, False),
    ("REVOKED", "RV", OVER, 75, False),
    ("SUSPENDED", "S", RUNS, None, False),
    ("TIMEOUT", "TO", OVER, 124, False),
    # squeue(1) alone
    ("CONFIGURING", "CF", WAITS, None, False),
    ("COMPLETING", "CG", ENDS, None, False),
    ("RESV_DEL_HOLD", "RD", WAITS, None, False),
    ("REQUEUE_FED", "RF", WAITS, None, False),
    ("REQUEUE_HOLD", "RH", WAITS, None, False),
    ("SIGNALING", "SI", RUNS, None, False),
    ("SPECIAL_EXIT", "SE", WAITS, None, False),
    ("STAGE_OUT", "SO", ENDS, None, False),
    ("STOPPED", "ST", RUNS, None, False),
    # the page "Job State Codes" alone: flags that stand beside a state, and say nothing about its end
    ("EXPEDITING", "", WAITS, None, False),
    ("LAUNCH_FAILED", "", ENDS, None, False),
    ("POWER_UP_NODE", "", WAITS, None, False),
    ("RECONFIG_FAIL", "", ENDS, None, False),
    ("UPDATE_DB", "", ENDS, None, False),
]


@pytest.mark.parametrize(("word", "short", "phase", "code", "returns"), TABLE, ids=[row[0] for row in TABLE])
def test_a_word_has_its_meaning_by_both_names(
    word: str, short: str, phase: str, code: int | None, returns: bool
) -> None:
    for name in (word, short) if short else (word,):
        state = parse_state(name)
        assert (state.word, state.phase, state.code, state.returns) == (word, phase, code, returns)
        assert state.terminal == (phase == OVER)


def test_the_table_holds_these_words_and_no_other() -> None:
    assert sorted(state.word for state in STATES) == sorted(row[0] for row in TABLE)
    names = [state.word for state in STATES] + [state.short for state in STATES if state.short]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        (" COMPLETED ", "COMPLETED"),
        ("COMPLETED by mistake", "COMPLETED by mistake"),
        ("completed", "completed"),
        ("NOT_COMPLETED", "NOT_COMPLETED"),
        ("", ""),
    ],
)
def test_suffixes_go_and_nothing_else_is_guessed(text: str, word: str) -> None:
    state = parse_state(text)
    assert state.word == word
    assert (state.phase == "unknown") == (word not in ("CANCELLED", "COMPLETED"))


@given(st.text())
def test_a_word_outside_the_table_is_never_an_end(text: str) -> None:
    state = parse_state(text)
    assert state in STATES or (state.phase == "unknown" and not state.terminal)


# --- exit codes ---


def test_exit_codes_are_read_whole() -> None:
    assert parse_exit_code("7:0") == ExitCode(7, 0)
    assert parse_exit_code("0:15").shell == 143
    assert parse_exit_code("137:0").shell == 137
    assert ExitCode(0, 0).zero and not ExitCode(0, 9).zero and not ExitCode(1, 0).zero


@pytest.mark.parametrize("text", ["", "7", "7:", ":0", "7:0:0", "a:b", "-1:0", "7:0 x", "None"])
def test_anything_else_is_no_exit_code(text: str) -> None:
    with pytest.raises(Unreadable, match="CODE:SIGNAL"):
        parse_exit_code(text)


@pytest.mark.parametrize(
    ("native", "recorded", "source", "answer"),
    [
        (0, ExitCode(0, 0), "sacct", True),
        (7, ExitCode(7, 0), "sacct", True),
        (7, ExitCode(8, 0), "sacct", False),
        (137, ExitCode(9, 0), "sacct", True),
        (128, ExitCode(0, 0), "sacct", True),
        (252, ExitCode(124, 0), "sacct", True),
        (137, ExitCode(9, 0), "scontrol", False),
        (137, ExitCode(137, 0), "scontrol", True),
        (137, ExitCode(0, 9), "sacct", True),
        (139, ExitCode(0, 11), "scontrol", True),
        (0, ExitCode(0, 9), "sacct", False),
        (9, ExitCode(0, 9), "sacct", False),
        (0, ExitCode(7, 0), "sacct", False),
    ],
)
def test_agreement_knows_that_accounting_folds(native: int, recorded: ExitCode, source: Source, answer: bool) -> None:
    assert agrees(native, recorded, source) is answer


# --- ids ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", JobId(123)),
        ("123_4", JobId(123, task=4)),
        ("123+1", JobId(123, offset=1)),
        ("123.0", JobId(123, step="0")),
        ("123.batch", JobId(123, step="batch")),
        ("123_4.extern", JobId(123, task=4, step="extern")),
        ("123+0.0", JobId(123, offset=0, step="0")),
    ],
)
def test_ids_come_back_as_they_were(text: str, expected: JobId) -> None:
    assert parse_job_id(text) == expected
    assert str(expected) == text
    assert expected.allocation == text.split(".")[0]


@pytest.mark.parametrize("text", ["", "0", "-1", "1;c", "1_", "1_[1-3]", "1 2", "1\n", "--jobs", "1.x", "01"])
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no Slurm job id"):
        parse_job_id(text)


def test_sbatch_prints_an_id_perhaps_with_a_cluster() -> None:
    assert parse_submitted("42\n") == ("42", None)
    assert parse_submitted("42;east-1\n") == ("42", "east-1")
    with pytest.raises(Unreadable):
        parse_submitted("Submitted batch job 42")


# --- hostlists ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1-3,5],gpu[01-02]", "node1 node2 node3 node5 gpu01 gpu02"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[0-1]n[1-2]", "r0n1 r0n2 r1n1 r1n2"),
        ("a,b-1.x", "a b-1.x"),
        ("x[1]-ib", "x1-ib"),
        ("None assigned", ""),
        ("(null)", ""),
        ("", ""),
    ],
)
def test_hostlists_expand(text: str, names: str) -> None:
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["n[", "n]", "n[1-", "n[3-1]", "n[a-b]", "a,,b", "n[]", "n[1,]", "a b", "n[[1]]"])
def test_malformed_hostlists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"malformed|impossible"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[0-99999999]", "a[0-999]b[0-999]c[0-999]", "n[0-9]," * 8000 + "n"])
def test_a_hostlist_cannot_eat_the_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"more than|impossible"):
        expand_hostlist(text)


def test_hostlists_compress() -> None:
    names = ["node1", "node2", "node3", "node5", "gpu01", "gpu02"]
    assert compress_hostlist(names) == "node[1-3,5],gpu[01-02]"
    assert compress_hostlist(["n9", "n10"]) == "n[9-10]"
    assert compress_hostlist(["login"]) == "login"
    assert compress_hostlist([]) == ""


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,4}[0-9]{0,4}", fullmatch=True), max_size=30))
def test_compressed_names_expand_to_themselves(names: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(names)) == tuple(names)


# --- times ---


def test_times_are_epochs_or_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_time("1796070518") == 1796070518.0
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert parse_time("2026-11-30T20:28:38") == 1796070518.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["Unknown", "N/A", "None", "(null)", "", "0", "2026-13-40T00:00:00", "soon"])
def test_an_unknown_time_is_none(text: str) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:01:00", 60.0),
        ("1-00:00:01", 86401.0),
        ("05:30", 330.0),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
        ("1-00:00:00 x", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


# --- environments ---

GOES = """
SLURM_LABELIO SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_STDINMODE SLURM_UNBUFFEREDIO SLURM_OPEN_MODE
SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_MEM_BIND
SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NPROCS SLURM_NNODES
SLURM_TRES_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_EXPORT_ENV SRUN_EXPORT_ENV
SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NODELIST SLURM_STEP_GPUS SLURM_DISTRIBUTION SLURM_TASKS_PER_NODE
SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPU_BIND SLURM_EXACT SLURM_OVERLAP SLURM_OVERCOMMIT SLURM_KILL_BAD_EXIT
SLURM_WAIT SLURM_EXIT_IMMEDIATE SLURM_HINT SLURM_THREADS_PER_CORE SLURM_TIMELIMIT SLURM_PROCID SLURM_LOCALID
SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_JOB_GPUS SLURM_CPUS_ON_NODE SLURMD_NODENAME
SLURM_LAUNCH_NODE_IPADDR SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SLURM_TOPOLOGY_ADDR SLURM_UMASK
SLURM_RLIMIT_NOFILE SLURM_PROFILE SLURM_NETWORK SLURM_MPI_TYPE SLURM_TASK_PROLOG SLURM_SOMETHING_NEW
SLURM_CLUSTERS SLURM_DEBUG SLURM_TIME_FORMAT SBATCH_MEM_BIND SALLOC_PARTITION
PMI_RANK PMI_FD PMI2_X PMIX_RANK PMIX_SERVER_URI3 VIRTUAL_ENV VIRTUAL_ENV_PROMPT
"""

STAYS = """
SLURM_JOB_ID SLURM_JOBID SLURM_CONF SLURM_CONF_SERVER SLURM_JWT SLURM_JOB_NODELIST SLURM_NODELIST
SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_RESTART_COUNT SLURM_CLUSTER_NAME SLURM_WORKING_CLUSTER
SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT SLURM_HET_SIZE SLURM_JOB_NODELIST_HET_GROUP_0
SLURM_JOB_ID_HET_GROUP_0 SLURM_JOB_ID_HET_GROUP_1 SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT SLURM_JOB_QOS
SLURM_JOB_USER SLURM_JOB_END_TIME SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST PATH HOME LD_LIBRARY_PATH PYTHONPATH PYTHONHOME
CUDA_VISIBLE_DEVICES TMPDIR SLURMISH PMIXED OMP_NUM_THREADS
"""


def test_srun_keeps_what_describes_the_job_and_the_user() -> None:
    environ = {name: f"value of {name}, with a comma" for name in (GOES + STAYS).split()}
    environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_0": "7"}
    kept = step_environment(environ)
    assert kept == {name: environ[name] for name in STAYS.split()}


def test_the_components_of_the_job_that_submitted_this_one_are_not_told_to_srun() -> None:
    inherited = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_NODELIST_HET_GROUP_1": "n1"}
    assert step_environment({"SLURM_JOB_ID": "8", **inherited}) == {"SLURM_JOB_ID": "8"}
    assert step_environment({"SLURM_JOB_ID": "7", **inherited}) == {"SLURM_JOB_ID": "7", **inherited}


def test_queries_are_not_filtered_by_variables() -> None:
    hidden = ("SQUEUE_PARTITION", "SACCT_FORMAT", "SCANCEL_STATE", "SCONTROL_ALL", "SLURM_JOB_ID", "SLURM_DEBUG")
    meant = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_CLUSTERS": "east"}
    kept = query_environment({**meant, **dict.fromkeys(hidden, "1"), "LC_ALL": "de_DE", "SLURM_TIME_FORMAT": "x"})
    assert kept == {**meant, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
