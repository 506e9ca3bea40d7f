"""What is submitted: sbatch's options, the script, the environment; and how a doubt about it is settled, purely."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.plan import Plan, parse_plan
from supervisor.core.sbatch_options import (
    PLACED,
    TAKEN,
    Misfit,
    Option,
    array_tasks,
    in_one_piece,
    read_options,
    time_limit,
)
from supervisor.core.settling import (
    Patience,
    Search,
    ids_by_output,
    ids_in_accounting,
    ids_in_queue,
    read_reply,
    sacct_commands_argv,
    squeue_commands_argv,
)
from supervisor.core.submission import Order, Submission, early_signal, make_order, submission_environment


def plan(name: str = "bench", nodes: Any = 4, **slurm: Any) -> Plan:
    data = {
        "job": {"name": name, "nodes": nodes},
        "coordinator": {"rank": 0},
        "roles": {"all": {"ranks": "0-3", "command": ["x"], "grace": 15}},
        "slurm": slurm,
    }
    return parse_plan(data, "p.toml")


def order(
    of: Plan, *options: str, environ: dict[str, str] | None = None, cluster: str | None = None, base: str = "/runs"
) -> Order:
    return make_order(
        of,
        base=base,
        token="t0",
        allocctl="/opt/allocd/bin/allocctl",
        version="1.2",
        options=options,
        environ=environ or {},
        cluster=cluster,
        user="ann",
        uid=1000,
    )


def directives(of: Order) -> list[str]:
    return [line[8:] for line in of.script.splitlines() if line.startswith("#SBATCH ")]


# --- options of sbatch ---


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ([], []),
        (["--time=5", "--hold"], [Option("time", "5"), Option("hold", None)]),
        (["-p", "debug", "-H", "-N2"], [Option("partition", "debug"), Option("hold", None), Option("nodes", "2")]),
        (["-Hpdebug"], [Option("hold", None), Option("partition", "debug")]),
        (["--comment=-o x"], [Option("comment", "-o x")]),
        (["-d", "-o"], [Option("dependency", "-o")]),
        (["--wait-all-nodes=1", "--time-min=1"], [Option("wait-all-nodes", "1"), Option("time-min", "1")]),
        (["-p"], [Option("partition", None)]),
    ],
)
def test_options_are_read_as_sbatch_reads_them(words: list[str], read: list[Option]) -> None:
    assert read_options(words) == read


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_cannot_be_given(name: str) -> None:
    with pytest.raises(Misfit) as caught:
        read_options(["-H", f"--{name}=x"])
    assert str(caught.value) == f"--{name}=x: sbatch's --{name} cannot be given: {TAKEN[name]}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "/x"], "-o: sbatch's --output cannot be given"),
        (["-HQ"], "-HQ: sbatch's --quiet cannot be given"),
        (["-W"], "sbatch's --wait cannot be given: sbatch would not answer before the job's end"),
        (["--wra=x"], "--wra=x: write options out (--wrap)"),
        (["--arr=1"], "--arr=1: write options out (--array)"),
        (["other.sh"], "'other.sh' is no option"),
        (["--comment", "x"], "'x' is no option: what belongs to one is written --name=value"),
        ([":"], "':' is no option"),
        (["-"], "'-' is no option"),
        (["--"], "'--' is no option"),
        (["--=x"], "'--=x' is no option"),
        (["-Z1"], "sbatch has no option -Z that allocctl knows"),
    ],
)
def test_misfits_are_named(words: list[str], said: str) -> None:
    with pytest.raises(Misfit) as caught:
        read_options(words)
    assert said in str(caught.value)


@given(st.sampled_from(sorted(TAKEN)), st.integers(1, 20))
def test_no_beginning_of_a_taken_word_gets_through(name: str, length: int) -> None:
    with pytest.raises(Misfit):
        read_options([f"--{name[:length]}=x"])


@given(st.lists(st.text("-oHWpx=a: ", max_size=5), max_size=4))
def test_anything_that_is_let_through_begins_with_a_dash_or_belongs_to_an_option(words: list[str]) -> None:
    try:
        read = read_options(words)
    except Misfit:
        return
    assert not {option.name for option in read} & set(TAKEN)
    free = [word for word in words if not word.startswith("-")]
    assert len(free) <= sum(option.value in free for option in read)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("00:01:00", 60), ("2-0", 172_800), ("1-2:3", 93_780), ("1-02:03:04", 93_784),
        ("100:00:00", 360_000), ("0", None), ("UNLIMITED", None), ("", None), ("1:2:3:4", None), ("-1", None),
    ],
)  # fmt: skip
def test_time_limits(text: str, seconds: float | None) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("3", (3,)), ("0-3", (0, 1, 2, 3)), ("1,5,3", (1, 3, 5)), ("0-8:4%2", (0, 4, 8)), ("1-2,2-3", (1, 2, 3)),
        ("3-1", None), ("x", None), ("", None), ("0-9999999", None), ("1%0", None),
    ],
)  # fmt: skip
def test_array_tasks(text: str, tasks: tuple[int, ...] | None) -> None:
    assert array_tasks(text) == tasks


# --- the script ---


@pytest.mark.parametrize("words", [["--nodes=3"], ["-N", "1-3"], ["-N3"], ["--nodes=9", "--nodes=1"], ["--nodes=1k-2"]])
def test_fewer_nodes_than_the_plan_has_are_refused(words: list[str]) -> None:
    with pytest.raises(Misfit, match="is too few for a plan of 4 nodes: leave it out"):
        order(plan(), *words)


@pytest.mark.parametrize("words", [["--nodes=4"], ["-N2-8"], ["--nodes=1", "-N8"], ["--nodes=1k"], ["--nodes=what"]])
def test_other_numbers_of_nodes_are_for_sbatch_to_judge(words: list[str]) -> None:
    assert set(words) <= set(order(plan(), *words).submission.argv)


def test_a_plain_script() -> None:
    made = order(plan(partition="gpu", account="a", qos="q", time="01:00:00", gres="gpu:8", constraint="a&b"))
    assert directives(made) == [
        "--job-name=bench",
        "--account=a",
        "--qos=q",
        "--time=01:00:00",
        "--output=/runs/submit-t0/slurm-%j.out",
        "--open-mode=append",
        "--signal=B:USR1@90",
        "--no-requeue",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--gres=gpu:8",
        '"--constraint=a&b"',
    ]
    assert made.script.startswith("#!/bin/bash\n")
    assert made.script.endswith('\nexec "$allocctl" run --dir /runs "$plan"\n')
    assert made.submission.argv == ("sbatch", "--parsable", "/runs/submit-t0/job.sh")
    assert made.submission.output == "/runs/submit-t0/slurm-%j.out"


def test_nodes_by_name_requeue_exclusive_and_own_options_at_the_end() -> None:
    made = order(plan(nodes=["n1", "n2", "n4", "n3"], exclusive=True, requeue=True, options=["--mem=0", "--comment"]))
    assert directives(made)[-6:] == [
        "--nodes=4", "--nodelist=n1,n2,n4,n3", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--comment"
    ]  # fmt: skip
    assert "--requeue" in directives(made) and "--no-requeue" not in directives(made)


def test_components() -> None:
    parts = [{"nodes": 1, "partition": "cpu"}, {"nodes": 3, "gres": "gpu:8", "options": ["--mem=0"]}]
    made = order(plan(nodes=["a", "b", "c", "d"], time=5, components=parts))
    lines = directives(made)
    place = lines.index("hetjob")
    assert lines[place - 4 : place] == ["--nodes=1", "--nodelist=a", "--ntasks-per-node=1", "--partition=cpu"]
    assert lines[place + 1 :] == ["--nodes=3", "--nodelist=b,c,d", "--ntasks-per-node=1", "--gres=gpu:8", "--mem=0"]
    assert lines.count("--signal=B:USR1@90") == 1
    assert made.submission.components == 2


def test_an_array() -> None:
    made = order(plan(array="0-7%2"))
    assert "--output=/runs/submit-t0/slurm-%A_%a.out" in directives(made)
    assert made.submission.tasks == tuple(range(8))
    asked = order(plan(array="0-7"), "-a", "3,4", environ={"SBATCH_ARRAY_INX": "1"})
    assert asked.submission.tasks == (3, 4)
    told = order(plan(), environ={"SBATCH_ARRAY_INX": "1-2"})
    assert told.submission.tasks == (1, 2) and told.submission.output.endswith("/slurm-%A_%a.out")


@pytest.mark.parametrize(
    ("limit", "seconds"), [(None, 90), ("10", 90), ("2", 60), ("00:01:00", 30), ("0", 90), ("00:01", 1)]
)
def test_the_early_signal_leaves_half_of_the_time(limit: str | None, seconds: int) -> None:
    assert early_signal(plan(), limit) == seconds


def test_the_signal_fits_the_time_that_counts() -> None:
    assert "--signal=B:USR1@30" in directives(order(plan(time=60), "--time=1", environ={"SBATCH_TIMELIMIT": "2"}))
    assert "--signal=B:USR1@60" in directives(order(plan(time=60), environ={"SBATCH_TIMELIMIT": "2"}))


def test_the_signal_is_no_number_that_sbatch_refuses() -> None:
    data = {
        "job": {"name": "x", "nodes": 2},
        "run": {"finish": "artifacts"},
        "roles": {"all": {"ranks": "0-1", "command": ["x"], "grace": 3600}},
        "artifacts": [{"name": "a", "path": "a"}],
        "deadlines": {"finalization": 3600, "collect": 14_400},
    }
    assert early_signal(parse_plan(data, "p"), None) == 21_600 <= 65_535


def sbatch_reads(line: str) -> list[str]:
    """The words of a #SBATCH line by the rules of sbatch's own reader: quotes of both kinds, a backslash before any
    character, a # outside of quotes begins a comment; `hetjob` anywhere would end the component."""
    assert "hetjob" not in line.lower() and "packjob" not in line.lower()
    words: list[str] = []
    word, quote, escaped, begun = "", "", False, False
    for character in line:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = begun = True
        elif quote:
            quote, word = ("", word) if character == quote else (quote, word + character)
        elif character in "\"'":
            quote, begun = character, True
        elif character == "#":
            break
        elif character.isspace():
            words, word, begun = ([*words, word] if begun else words), "", False
        else:
            word, begun = word + character, True
    assert not quote
    return [*words, word] if begun else words


HOSTILE = [
    "a b",
    'a"b',
    "a'b",
    "a\\",
    'a\\"',
    "#x",
    "a # b",
    "hetjob",
    "my HetJob1",
    "packjob",
    "$(touch x)",
    "`x`",
    "é",
    "%j",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_values_stay_values(text: str) -> None:
    made = order(plan(name=text, options=[f"--comment={text}"]), base=f"/r/{text.replace(chr(92), '_')}")
    lines = directives(made)
    assert sbatch_reads(lines[0]) == [f"--job-name={text}"]
    assert sbatch_reads(lines[-1]) == [f"--comment={text}"]
    last = shlex.split(made.script.splitlines()[-1])
    assert last == ["exec", "$allocctl", "run", "--dir", made.submission.base, "$plan"]
    output = next(line for line in lines if "--output" in line)
    assert sbatch_reads(output) == [f"--output={made.directory.replace('%', '%%')}/slurm-%j.out"]


@given(st.text(st.characters(exclude_categories=("C", "Zl", "Zp", "Zs")) | st.just(" "), min_size=1, max_size=20))
def test_any_printable_name_is_one_word(name: str) -> None:
    assert sbatch_reads(directives(order(plan(name=name)))[0]) == [f"--job-name={name}"]


def test_a_base_with_a_backslash_is_refused() -> None:
    with pytest.raises(Misfit, match="backslash"):
        order(plan(), base="/a\\b")


# --- the script, run ---


def run_script(tmp_path: Path, *, allocctl: str | None, made: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a rendered script as Slurm would; `allocctl` is that file's text, None: there is no file."""
    program = tmp_path / "bin dir" / "allocctl"
    program.parent.mkdir()
    if allocctl is not None:
        program.write_text(allocctl)
        program.chmod(0o755)
    base = tmp_path / "it's $HOME"
    of = make_order(
        plan(), base=str(base), token="t", allocctl=str(program), version="1.2", options=(), environ={}, cluster=None,
        user="ann", uid=1,
    )  # fmt: skip
    Path(of.directory).mkdir(parents=True)
    if made:
        Path(of.submission.plan).write_text("")
    script = Path(of.submission.script)
    script.write_text(of.script)
    return subprocess.run(
        ["bash", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n7"},
    )


GOOD = '#!/bin/sh\n[ "$1" = --version ] && echo "allocctl 1.2" && exit\nprintf "<%s>" "$@"; exit 7\n'


def test_the_script_execs_allocctl(tmp_path: Path) -> None:
    done = run_script(tmp_path, allocctl=GOOD)
    base = tmp_path / "it's $HOME"
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"<run><--dir><{base}><{base}/submit-t/plan.toml>"


@pytest.mark.parametrize(
    ("allocctl", "said"),
    [
        (None, "is not there on n7"),
        ("#!/nowhere/python3.11\n", "needs the interpreter /nowhere/python3.11, which is not there on n7"),
        ("#!/usr/bin/env nowhere-python\n", "does not run on n7: its own words are above"),
        ("#!/bin/sh\necho broken >&2\nexit 1\n", "does not run on n7"),
        ('#!/bin/sh\necho "allocctl 0.9"\n', "on n7 is 'allocctl 0.9', but the plan was submitted by allocctl 1.2"),
    ],
)
def test_the_script_says_why_a_node_cannot_run_it(tmp_path: Path, allocctl: str | None, said: str) -> None:
    done = run_script(tmp_path, allocctl=allocctl)
    assert done.returncode == 78
    assert said in done.stderr and done.stderr.splitlines()[-1].startswith("allocctl submit: ")


def test_a_submission_that_was_given_up_runs_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, allocctl=GOOD, made=False)
    assert done.returncode == 78 and done.stdout == ""
    assert "this submission was given up" in done.stderr


# --- the environment ---


def test_what_sbatch_and_the_job_get() -> None:
    environ = {
        "HOME": "/h", "PATH": "/v/bin:/usr/bin:/v/bin/:/v/bin2", "VIRTUAL_ENV": "/v/", "VIRTUAL_ENV_PROMPT": "v",
        "PYTHONHOME": "/v", "__PYVENV_LAUNCHER__": "x", "PYTHONPATH": "/p",
        "SLURM_CONF": "/c", "SLURM_JWT": "j", "SLURM_JOB_ID": "7", "SLURM_EXPORT_ENV": "NONE", "SLURM_CLUSTERS": "c",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_EXIT_ERROR": "0", "SLURM_HINT": "x", "SLURMD_NODENAME": "n",
        "SBATCH_PARTITION": "p", "SBATCH_TIMELIMIT": "5", "SBATCH_EXPORT": "ALL",
        "SBATCH_WAIT": "1", "SBATCH_OUTPUT": "/x", "SBATCH_ERROR": "/x", "SBATCH_OPEN_MODE": "t", "SBATCH_SIGNAL": "9",
        "SBATCH_CLUSTERS": "c", "SBATCH_DEBUG": "1", "SALLOC_X": "1", "SRUN_X": "1",
        "ALLOCD_RUN_DIR": "/r", "ALLOCD_MARKER": "/m", "ALLOCD_RUNS": "/runs",
    }  # fmt: skip
    assert submission_environment(environ) == {
        "HOME": "/h", "PATH": "/usr/bin:/v/bin2", "PYTHONPATH": "/p", "SLURM_CONF": "/c", "SLURM_JWT": "j",
        "SBATCH_PARTITION": "p", "SBATCH_TIMELIMIT": "5", "SBATCH_EXPORT": "ALL", "ALLOCD_RUNS": "/runs",
    }  # fmt: skip
    assert submission_environment({"VIRTUAL_ENV": "/v"}) == {}
    assert submission_environment({"PATH": "/v/bin:/usr/bin"}) == {"PATH": "/v/bin:/usr/bin"}


# --- the record ---


def test_the_record_is_read_again() -> None:
    made = order(plan(array="1-2"), "--comment=x", cluster="east", environ={"SBATCH_JOB_NAME": "other"}).submission
    assert made.argv == ("sbatch", "--parsable", "--clusters=east", "--comment=x", "/runs/submit-t0/job.sh")
    assert (made.name, made.cluster, made.state, made.tasks) == ("other", "east", "asked", (1, 2))
    asked = replace(made, asked="2026-11-30T20:00:00.000Z")
    assert Submission.from_dict(json.loads(json.dumps(asked.to_dict()))) == asked
    with pytest.raises(ValueError, match="isoformat"):
        Submission.from_dict(made.to_dict())
    with pytest.raises(ValueError, match="tasks that are no numbers"):
        Submission.from_dict({**asked.to_dict(), "tasks": ["1"]})
    assert (asked.asked_at, asked.answered_at) == (1796068800.0, None)
    assert replace(asked, answered="2026-11-30T20:00:01Z").answered_at == 1796068801.0


@pytest.mark.parametrize("data", [None, [], {}, {"schema_version": 2}, {"schema_version": 1, "token": "x"}])
def test_what_is_no_record(data: Any) -> None:
    with pytest.raises(ValueError, match="no record of a submission"):
        Submission.from_dict(data)


# --- sbatch's answer ---


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "trouble", "kind"),
    [
        (0, "12\n", "", "", "submitted"),
        (0, "12;east\n", "sbatch: a plugin's words\n", "", "submitted"),
        (0, "", "", "", "doubtful"),
        (0, "Submitted batch job 12\n", "", "", "doubtful"),
        (0, "hello\n12\n", "", "", "doubtful"),
        (1, "", "sbatch: error: Batch job submission failed: Invalid account\n", "", "refused"),
        (1, "", "sbatch: unrecognized option '--x'\nTry \"sbatch --help\" for more information\n", "", "refused"),
        (1, "", "sbatch: fatal: No command given to execute.\n", "", "refused"),
        (1, "", "", "", "doubtful"),
        (1, "", "sbatch: a plugin's words\n", "", "doubtful"),
        (2, "", "our wrapper: error: the log is full\n", "", "doubtful"),
        (1, "12\n", "sbatch: error: a plugin failed\n", "", "doubtful"),
        (1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", "", "doubtful"),
        (1, "", "sbatch: error: ...: Unable to contact slurm controller (receive failure)", "", "doubtful"),
        (1, "", "sbatch: error: ...: Zero Bytes were transmitted or received", "", "doubtful"),
        (1, "", "sbatch: error: ...: Unable to contact slurm controller (connect failure)", "", "refused"),
        (-9, "", "", "", "doubtful"),
        (137, "", "", "", "doubtful"),
        (None, "12\n", "", "sbatch did not answer within 60 s", "doubtful"),
    ],
)
def test_answers_of_sbatch(returncode: int | None, stdout: str, stderr: str, trouble: str, kind: str) -> None:
    reply = read_reply(returncode, stdout, stderr, trouble)
    assert reply.kind == kind
    assert (reply.jobid == "12") == (kind == "submitted")
    assert reply.reached == ("connect failure" not in stderr)


def test_the_words_of_sbatch() -> None:
    said = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: \x1b[1mx\n"
    assert read_reply(1, "", said).words == r"invalid partition specified: nope; Batch job submission failed: \x1b[1mx"
    assert read_reply(3, "", "").words == "sbatch ended with 3"
    assert read_reply(0, "12\n", "").words == ""


# --- where a job is looked for ---


def test_queries_are_about_ones_own_jobs() -> None:
    assert squeue_commands_argv(None) == ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%o"]
    assert squeue_commands_argv("east")[1] == "--clusters=east"
    argv = sacct_commands_argv(1000, 75, "east")
    assert {"--user=1000", "--starttime=now-75minutes", "--endtime=2100-01-01", "--clusters=east"} <= set(argv)


SCRIPT = "/runs/a b/submit-1/job.sh"
QUEUE = f"""\
12|{SCRIPT}
13|{SCRIPT}.old
14|/x{SCRIPT}
15|/other.sh {SCRIPT}
16|(null)
x17|{SCRIPT}
18
20_[2-3%1]|{SCRIPT}
20_1|{SCRIPT}
21+1|{SCRIPT}
"""


def test_a_command_is_the_script_and_nothing_else() -> None:
    assert ids_in_queue(QUEUE, SCRIPT) == {"12", "20", "21"}
    assert ids_in_queue("", SCRIPT) == set()


def test_the_last_word_of_a_command_line_is_the_script() -> None:
    text = (
        f"12|sbatch --parsable {SCRIPT}\n13_2|/usr/bin/sbatch --comment=a|b {SCRIPT}\n14+0|sbatch {SCRIPT} x\n"
        f"15|sbatch {SCRIPT}x\n16|sbatch x{SCRIPT}\nnoise {SCRIPT}\n"
    )
    assert ids_in_accounting(text, SCRIPT) == {"12", "13"}


def test_outputs_tell_ids() -> None:
    assert ids_by_output(["slurm-12.out", "slurm-13_4.out", "slurm-.out", "slurm-0.out", "job.sh"]) == {"12", "13"}


# --- the verdict of the looks ---

LOOKS = Patience(absence=10, looks=3)


def search(*looks: tuple[float, set[str], str]) -> Search:
    made = Search(LOOKS)
    for look in looks:
        made.hear(*look)
    return made


def test_found_is_found() -> None:
    assert search((0, {"7"}, "")).finding == "found"
    assert search((0, set(), ""), (1, {"7"}, "no controller")).finding == "found"
    assert search((0, {"7"}, ""), (1, {"8"}, "")).finding == "several"


def test_absence_takes_time_and_looks() -> None:
    empty: set[str] = set()
    assert search().finding == "open"
    assert search((0, empty, "")).finding == "open"
    assert search((0, empty, ""), (20, empty, "")).finding == "open"
    assert search((0, empty, ""), (1, empty, ""), (2, empty, "")).finding == "open"
    assert search((0, empty, ""), (5, empty, ""), (10, empty, "")).finding == "absent"
    away = [(0.0, empty, ""), (5.0, empty, ""), (9.0, empty, "no answer"), (10.0, empty, ""), (19.0, empty, "")]
    assert search(*away).finding == "open"
    assert search(*away, (20.0, empty, "")).finding == "absent"


def test_every_placed_option_names_a_key_of_plans() -> None:
    data = {"job": {"name", "nodes"}, "slurm": set(plan().slurm.__slots__)}
    for place in PLACED.values():
        section, key = place.split(",")[0].split(":")[0].split(".")
        assert key in data[section]


def test_options_in_one_piece() -> None:
    words = ["-p", "debug", "--mem=0", "-Hp", "x", "-c-1", "-H", "-t", "1", "-p"]
    assert in_one_piece(words) == ["-pdebug", "--mem=0", "-Hpx", "-c-1", "-H", "-t1", "-p"]
