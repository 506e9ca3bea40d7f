"""squeue, sacct, scontrol, sbatch, scancel and srun of a Slurm that is a file: what they print is what Slurm 22.05
prints of such jobs (tests/unit/test_fake_slurm.py compares them with the corpus).

    DIR/bin/NAME     this program, by the name of the command that it plays
    DIR/state.json   the cluster: its jobs with their histories, and when its two daemons are away

An array is a job for each of its tasks, by the id that people call it by (101_0); its raw id is another number, but for
the last one, which has the array's. That tasks which wait have one record together is not played.

A job is a list of moments, each `[at, state, code]` in epoch seconds: what it is now is the last one that has come.
Nothing runs but what is asked: a job whose cluster says `real` runs its script, and its sruns run their commands, all
on this machine; the histories of the others were written when they were submitted. Standard library only, and started
with -I -S, for a thousand questions must cost little.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

State = dict[str, Any]
Job = dict[str, Any]

REASONS = {"FAILED": "NonZeroExitCode", "TIMEOUT": "TimeLimit", "NODE_FAIL": "NodeDown", "OUT_OF_MEMORY": "OutOfMemory"}
"""Why a job is as it is, where its state says so; None else."""
LIVING = ("PENDING", "RUNNING")
UNBOOKED = ("CANCELLED", "TIMEOUT")
"""Jobs that accounting gives the code 0:0, whatever the controller says."""
BATCH = {"CANCELLED": ("CANCELLED", "0:15"), "TIMEOUT": ("CANCELLED", "0:15"), "NODE_FAIL": ("CANCELLED", "")}
"""How accounting tells of the batch step of a job that ended so; as of the job else."""
SILENCE = 8.0  # seconds until a command gives up a controller that is away
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"
AWAY = "Unable to contact slurm controller (connect failure)"
CLOSED = """\
sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:127.0.0.1:23071: \
Connection refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused"""
SHOWN = """\
JobId={raw}{array} JobName={name}
   UserId={user}({uid}) GroupId={user}({uid}) MCS_label=N/A
   Priority=4294901756 Nice=0 Account=root QOS=normal
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime={run} TimeLimit={limit} TimeMin=N/A
   SubmitTime={submit} EligibleTime={submit}
   AccrueTime={submit}
   StartTime={start} EndTime={end} Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval={submit} Scheduler=Backfill
   Partition=main AllocNode:Sid=localhost:1
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
{host}   NumNodes={count} NumCPUs={count} NumTasks={count} CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu={count},node={count},billing={count}
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command={script}
   WorkDir={cwd}
   StdErr=/dev/null
   StdIn=/dev/null
   StdOut=/dev/null
   Power=
   

"""  # noqa: W293 - as printed


class Failed(Exception):
    """The command's end: words on stderr and exit code 1."""


class Cluster:
    """The file."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = os.path.join(directory, "state.json")

    def read(self) -> State:
        with open(self.path) as file:
            found: State = json.load(file)
        return found

    @contextmanager
    def changed(self) -> Iterator[State]:
        """The state, which is written at the end. One at a time."""
        with open(os.path.join(self.directory, "lock"), "a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            state = self.read()
            yield state
            temporary = f"{self.path}.new"
            with open(temporary, "w") as file:
                json.dump(state, file)
            os.replace(temporary, self.path)


# --- what is so now ---------------------------------------------------------------------------------------------------


def clock(state: State) -> float:
    """The time: the one at which the cluster is held, or its own, which goes on steadily whatever clocks are set to."""
    return float(state["now"] or state["epoch"] + time.monotonic())


def within(spans: list[list[float]], now: float) -> bool:
    return any(begin <= now < end for begin, end in spans)


def reach_controller(state: State, prefix: str) -> None:
    """Raises Failed when slurmctld is away, after the time that Slurm's commands take to find out."""
    if within(state["controller_away"], clock(state)):
        time.sleep(SILENCE)
        raise Failed(f"{prefix}: {AWAY}")


def standing(job: Job, at: float) -> list[Any]:
    """Its moment, at a time."""
    found: list[Any] = next((moment for moment in reversed(job["moments"]) if moment[0] <= at), job["moments"][0])
    return found


def word(job: Job, at: float) -> str:
    """Its state, one word."""
    return str(standing(job, at)[1]).partition(" ")[0]


def started(job: Job, at: float) -> int | None:
    return next((int(moment[0]) for moment in job["moments"] if moment[1] == "RUNNING" and moment[0] <= at), None)


def ended(job: Job, at: float) -> int | None:
    moment = standing(job, at)
    return None if word(job, at) in LIVING else int(moment[0])


def named(state: State, name: str) -> dict[str, Job]:
    """The jobs that an id means: a job, by its raw id too; or all tasks of an array."""
    jobs: dict[str, Job] = state["jobs"]
    if name in jobs:
        return {name: jobs[name]}
    array = {jobid: job for jobid, job in jobs.items() if jobid.startswith(f"{name}_")}
    return array or {jobid: job for jobid, job in jobs.items() if job["raw"] == name}


def remembered(state: State, name: str) -> dict[str, Job]:
    """Those of them that the controller knows."""
    now = clock(state)
    return {
        jobid: job
        for jobid, job in named(state, name).items()
        if (end := ended(job, now)) is None or now - end <= state["memory"]
    }


def times(job: Job, now: float, absent: str) -> tuple[str, str]:
    """Start and end as the controller tells them: the end of a running job is that of its time limit, and a job that
    ended before it began did both at once."""
    start, end = started(job, now), ended(job, now)
    if start is None:
        return (absent, absent) if end is None else (str(end), str(end))
    return str(start), str(start + job["limit"] * 60 if end is None else end)


def reason(job: Job, now: float) -> str:
    return str(job["reason"] if job["reason"] != "None" else REASONS.get(word(job, now), "None"))


# --- the commands -----------------------------------------------------------------------------------------------------


def option(words: list[str], name: str) -> str | None:
    return next((given.partition("=")[2] for given in words if given.startswith(f"{name}=")), None)


def squeue(cluster: Cluster, words: list[str]) -> str:
    """Jobs by id, one's own jobs with their commands, or a job's steps."""
    state = cluster.read()
    reach_controller(state, "slurm_load_jobs error")
    now = clock(state)
    if "--me" in words:
        mine = [(jobid, job) for jobid, job in state["jobs"].items() if jobid in remembered(state, jobid)]
        return "".join(f"{jobid}|{job['script']}\n" for jobid, job in mine)
    asked = (option(words, "--jobs") or "").split(",")
    known = {jobid: job for name in asked for jobid, job in remembered(state, name).items()}
    if not known and len(asked) == 1:
        raise Failed(UNKNOWN)
    if "--steps" in words:
        living = [step for job in known.values() for step in job["steps"].items() if step[1]["end"] is None]
        return "".join(f"{asked[0]}.{number}|{step['name']}\n" for number, step in living)
    lines = []
    for jobid, job in known.items():
        start, end = times(job, now, "N/A")
        fields = (job["raw"], jobid, word(job, now), job["submit"], start, end, job["uid"], 0, reason(job, now))
        lines.append("|".join(map(str, fields)) + "|\n")
    return "".join(lines)


def sacct(cluster: Cluster, words: list[str]) -> str:
    """Rows of jobs by id, with their steps, as they were a moment ago; or one's own jobs with sbatch's command line."""
    state = cluster.read()
    now = clock(state)
    if within(state["accounting_away"], now):
        raise Failed(CLOSED)
    if "--format=JobID,SubmitLine" in words:
        return "".join(f"{jobid}|{job['line']}\n" for jobid, job in state["jobs"].items())
    asked = (option(words, "--jobs") or "").split(",")
    whole = "--allocations" not in words
    found = {jobid: job for name in asked for jobid, job in named(state, name).items()}
    return "".join(rows(state, jobid, job, now - state["lag"], whole) for jobid, job in found.items())


def rows(state: State, jobid: str, job: Job, at: float, steps: bool) -> str:
    if job["moments"][0][0] > at:
        return ""  # accounting has not heard of it
    start, end = started(job, at), ended(job, at)
    begin = str(start or end or "Unknown")
    nodes = job["nodes"] if start else "None assigned"
    _, told, native = standing(job, at)
    booked = "0:0" if word(job, at) in UNBOOKED else folded(native)
    worst = max((int(step["code"].partition(":")[0] or 0) for step in job["steps"].values()), default=0)
    head = (job["raw"], told, booked, f"{worst}:0", jobid, job["submit"], begin, end or "Unknown", job["user"])
    lines: list[tuple[Any, ...]] = [(*head, state["cluster"], nodes)]
    if start and steps:
        killed = not native.endswith(":0")
        told, code = BATCH.get(word(job, at), ("CANCELLED" if killed else told, folded(native)))
        raw, name = f"{job['raw']}.batch", f"{jobid}.batch"
        node = nodes_of(nodes)[0]
        lines.append((raw, told, code, "", name, start, start, end or "Unknown", "", state["cluster"], node))
        for number, step in job["steps"].items():
            raw, name = f"{job['raw']}.{number}", f"{jobid}.{number}"
            over = step["end"] is not None and step["end"] <= at
            told, code = (step["state"], folded(step["code"])) if over else ("RUNNING", "0:0")
            span = (int(step["start"]), int(step["start"]), int(step["end"]) if over else "Unknown")
            lines.append((raw, told, code, "", name, *span, "", state["cluster"], step["node"]))
    return "".join("|".join(map(str, line)) + "\n" for line in lines)


def folded(code: str) -> str:
    """Accounting keeps seven bits of an exit code."""
    native, _, number = code.partition(":")
    return f"{int(native) % 128}:{number}"


def nodes_of(text: str) -> list[str]:
    """The nodes of a list with one range at most."""
    if match := re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", text):
        return [f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)]
    return [text]


def scontrol(cluster: Cluster, words: list[str]) -> str:
    """`show job ID`."""
    state = cluster.read()
    reach_controller(state, "slurm_load_jobs error")
    if not (known := remembered(state, words[-1])):
        raise Failed(UNKNOWN)
    return "".join(shown(jobid, job, clock(state)) for jobid, job in known.items())


def shown(jobid: str, job: Job, now: float) -> str:
    array, _, task = jobid.partition("_")
    start, end = times(job, now, "Unknown")
    begun = started(job, now)
    ran = 0 if begun is None else (ended(job, now) or int(now)) - begun
    nodes = nodes_of(job["nodes"])
    told = {
        "array": f" ArrayJobId={array} ArrayTaskId={task}" if task else "",
        "state": word(job, now),
        "reason": reason(job, now),
        "code": standing(job, now)[2],
        "run": time.strftime("%H:%M:%S", time.gmtime(ran)),
        "limit": f"{job['limit'] // 60:02}:{job['limit'] % 60:02}:00",
        "start": start,
        "end": end,
        "count": len(nodes),
        "nodes": job["nodes"] if begun else "",
        "host": f"   BatchHost={nodes[0]}\n" if begun else "",
    }
    return SHOWN.format(**{**job, **told})


def sbatch(cluster: Cluster, words: list[str]) -> str:
    """A job for the script, which is the last word. Its history is what the cluster's next jobs are to have."""
    script = words[-1]
    with open(script) as file:
        given = [word for line in file if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    reach_controller(cluster.read(), "sbatch: error: Batch job submission failed")
    with cluster.changed() as state:
        jobid, now, uid = str(state["next"]), clock(state), os.getuid()
        made = raw_ids(jobid, option(given, "--array"))
        state["next"] += len(made)
        count = int(option(given, "--nodes") or 1)
        job = {
            "submit": int(now),
            "moments": [[now + after, told, code] for after, told, code in state["history"]],
            "reason": "None",
            "name": option(given, "--job-name") or "sbatch",
            "user": pwd.getpwuid(uid).pw_name,
            "uid": uid,
            "nodes": f"node[1-{count}]" if count > 1 else "node1",
            "limit": 600,
            "script": script,
            "cwd": os.getcwd(),
            "line": " ".join(["sbatch", *words]),
        }
        state["jobs"] |= {name: {**job, "raw": raw, "steps": {}, "pids": []} for name, raw in made.items()}
        real = state["real"]
    if real:
        for name in made:
            run_batch(cluster, name, script, option(given, "--output") or "/dev/null")
    return f"{jobid}\n"


def raw_ids(jobid: str, array: str | None) -> dict[str, str]:
    """The raw ids of a new job, or of the tasks of an array: the last one's is the array's own."""
    if array is None:
        return {jobid: jobid}
    spans = [span.partition("-") for span in array.partition("%")[0].split(",")]
    tasks = [task for low, _, high in spans for task in range(int(low), int(high or low) + 1)]
    raws = [*range(int(jobid) + 1, int(jobid) + len(tasks)), int(jobid)]
    return {f"{jobid}_{task}": str(raw) for task, raw in zip(tasks, raws, strict=True)}


def run_batch(cluster: Cluster, jobid: str, script: str, output: str) -> None:
    """Leave a process behind that runs the script, and writes down how that ended."""
    if os.fork():
        return
    os.setsid()
    array, _, task = jobid.partition("_")
    for mark, text in (("%j", jobid), ("%A", array), ("%a", task)):
        output = output.replace(mark, text)
    with open(output, "ab") as log, open(os.devnull) as nothing:
        for number, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file.fileno(), number)
    nodes, raw = (cluster.read()["jobs"][jobid][key] for key in ("nodes", "raw"))
    own = {"SLURM_JOB_ID": raw, "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(len(nodes_of(nodes)))}
    env = {**os.environ, **own, "SLURMD_NODENAME": nodes_of(nodes)[0], "SLURM_RESTART_COUNT": "0"}
    if task:
        env |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    batch = subprocess.Popen([script], env=env, start_new_session=True)
    with cluster.changed() as state:
        state["jobs"][jobid]["moments"].append([clock(state), "RUNNING", "0:0"])
        state["jobs"][jobid]["pids"] += [batch.pid, os.getpid()]
    native = exit_code(batch.wait())
    with cluster.changed() as state:
        job = state["jobs"][jobid]
        if word(job, clock(state)) in LIVING:
            job["moments"].append([clock(state), "COMPLETED" if native == "0:0" else "FAILED", native])
    os._exit(0)


def exit_code(ended_with: int) -> str:
    return f"0:{-ended_with}" if ended_with < 0 else f"{ended_with}:0"


def scancel(cluster: Cluster, words: list[str]) -> str:
    """A job's end (of an array, each task's), or a signal to its batch script or to one of its steps."""
    jobid, _, step = words[-1].partition(".")
    name = option(words, "--signal") or "TERM"
    reach_controller(cluster.read(), "scancel: error")
    with cluster.changed() as state:
        state["cancelled"].append(words)
        now, reached = clock(state), list[int]()
        for job in named(state, jobid).values():
            if word(job, now) not in LIVING:
                continue
            reached += [job["steps"][step]["pid"]] if step else job["pids"][:1]
            if not step and "--batch" not in words:
                past = [moment for moment in job["moments"] if moment[0] <= now]
                job["moments"] = [*past, [now, f"CANCELLED by {os.getuid()}", "0:0"]]
    for pid in reached:
        try:
            os.kill(pid, signal.Signals[f"SIG{name}"])
        except ProcessLookupError:
            continue
    return ""


def srun(cluster: Cluster, words: list[str]) -> str:
    """A step: the command, run here, as the node's only task."""
    command = words[next(at for at, given in enumerate(words) if not given.startswith("--")) :]
    raw, node = option(words, "--jobid") or os.environ["SLURM_JOB_ID"], option(words, "--nodelist") or "node1"
    with cluster.changed() as state:
        (jobid,) = (jobid for jobid, job in state["jobs"].items() if raw in (jobid, job["raw"]))
        steps = state["jobs"][jobid]["steps"]
        number, begun = str(len(steps)), clock(state)
        name = option(words, "--job-name") or os.path.basename(command[0])
        steps[number] = {"name": name, "node": node, "start": begun, "end": None, "state": "", "code": "", "pid": 0}
    own = {"SLURM_JOB_ID": raw, "SLURM_STEP_ID": number, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    stdin = subprocess.DEVNULL if option(words, "--input") == "none" else None
    task = subprocess.Popen(command, env={**os.environ, **own, "SLURMD_NODENAME": node}, stdin=stdin)
    signal.signal(signal.SIGTERM, lambda *_: task.kill())  # as srun does: no handler of the task's runs
    with cluster.changed() as state:
        state["jobs"][jobid]["steps"][number]["pid"] = task.pid
    code = task.wait()
    with cluster.changed() as state:
        told = "COMPLETED" if code == 0 else "CANCELLED" if code < 0 else "FAILED"
        state["jobs"][jobid]["steps"][number] |= {"end": clock(state), "state": told, "code": exit_code(code)}
    sys.exit(128 - code if code < 0 else code)


COMMANDS: dict[str, Callable[[Cluster, list[str]], str]] = {
    each.__name__: each for each in (squeue, sacct, scontrol, sbatch, scancel, srun)
}


def main() -> int:
    directory, name = os.path.split(os.path.abspath(sys.argv[0]))
    try:
        sys.stdout.write(COMMANDS[name](Cluster(os.path.dirname(directory)), sys.argv[1:]))
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
