"""The plan's rules: what a good plan becomes, and what each mistake is told as."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import artifact_table, slurm_table
from supervisor.core import plan as plans
from supervisor.core.artifact_table import Artifact, FieldRule
from supervisor.core.fields import PlanError, PlanErrors
from supervisor.core.plan import (
    Collect,
    Deadlines,
    Marker,
    Plan,
    Role,
    parse_plan,
    schema,
    values_for,
)
from supervisor.core.sbatch_options import TAKEN
from supervisor.core.slurm_table import Component, Slurm
from supervisor.core.substitution import RANK_WORDS, RUN_WORDS, SubstitutionError, substitute, words_in

SMALL = """
[job]
name = "bench"
nodes = 4
[coordinator]
rank = 0
[roles.client]
ranks = 0
command = ["client"]
[roles.server]
ranks = "1-3"
command = ["server", "--rank={rank}"]
"""

FULL = """
[job]
name = "a job"
nodes = ["n1", "n2", "n3"]
python = "/usr/bin/python3"
[run]
dir = "/scratch/runs"
finish = "artifacts"
start = "each"
[coordinator]
role = "client"
[roles.client]
ranks = [1]
command = ["sh", "-c", '''
exec client {coordinator_node}
''', ""]
env = { A = "{run_dir}/a", B_2 = "" }
cwd = "{run_dir}/work"
stop_signal = "SIGINT"
grace = 2.5
may_finish = true
srun_options = ["--container-mounts={run_dir}:/out", "-v"]
[roles.server]
ranks = [2, 0]
command = ["server", "{node}", "{{literal}}"]
critical = false
agent = "off"
[marker]
path = "/shared/.done.{jobid}"
by = "coordinator"
recheck = 0
[[artifacts]]
name = "result"
path = "out/*/r_[0-9].json"
count = 2
format = "json"
fields = { "a.b.0" = { equals = 0 }, "n" = { min = 1, max = 2.5 }, "l" = { length_min = 0 }, "no" = { exists = false } }
[[artifacts]]
name = "log"
path = "{rank}/**"
root = "/data/{jobid}"
per = "node"
roles = ["server"]
non_empty = false
required = false
[deadlines]
hello = 5
run = 3600
artifacts = 1800.5
finalization = 1
collect = 10
silence = 20
journal = 2
[collect]
paths = ["*.log", "/var/log/{jobid}/*"]
required = true
"""


def small() -> Any:
    return tomllib.loads(SMALL)


def complaints(data: Any) -> list[PlanError]:
    with pytest.raises(PlanErrors) as caught:
        parse_plan(data, "p.toml")
    return caught.value.errors


# ------------------------------------------------------------------------------------------------------ good plans


def test_a_small_plan_gets_the_defaults() -> None:
    assert parse_plan(small(), "p.toml") == Plan(
        name="bench",
        nodes=4,
        roles=(
            Role("client", (0,), ("client",)),
            Role("server", (1, 2, 3), ("server", "--rank={rank}")),
        ),
        base="runs",
        finish="coordinator",
        start="together",
        coordinator=0,
        marker=Marker("{run_dir}/.bench_done.{jobid}", "supervisor", 5),
        artifacts=(),
        deadlines=Deadlines(60, None, None, 120, 60, 60, 5),
        collect=Collect(),
        python=None,
    )


def test_a_full_plan_is_read_whole() -> None:
    plan = parse_plan(tomllib.loads(FULL), "p.toml")
    client, server = plan.roles
    assert client == Role(
        name="client",
        ranks=(1,),
        command=("sh", "-c", "exec client {coordinator_node}\n", ""),
        env={"A": "{run_dir}/a", "B_2": ""},
        cwd="{run_dir}/work",
        stop_signal="INT",
        grace=2.5,
        critical=True,
        may_finish=True,
        agent="on",
        srun_options=("--container-mounts={run_dir}:/out", "-v"),
    )
    assert (server.ranks, server.critical, server.agent) == ((0, 2), False, "off")
    assert (plan.name, plan.nodes, plan.python) == ("a job", ("n1", "n2", "n3"), "/usr/bin/python3")
    assert (plan.base, plan.finish, plan.start) == ("/scratch/runs", "artifacts", "each")
    assert plan.coordinator == 1
    assert plan.marker == Marker("/shared/.done.{jobid}", "coordinator", 0)
    assert plan.deadlines == Deadlines(5, 3600, 1800.5, 1, 10, 20, 2)
    assert plan.collect == Collect(("*.log", "/var/log/{jobid}/*"), required=True)
    result, log = plan.artifacts
    rules = {
        "a.b.0": FieldRule(equals=0),
        "n": FieldRule(min=1, max=2.5),
        "l": FieldRule(length_min=0),
        "no": FieldRule(exists=False),
    }
    assert result == Artifact("result", "out/*/r_[0-9].json", count=2, format="json", fields=rules)
    assert log == Artifact(
        "log", "{rank}/**", "/data/{jobid}", per="node", roles=("server",), non_empty=False, required=False
    )
    assert (plan.ranks, plan.size) == ((0, 1, 2), 3)
    assert plan.role_of(2) is server
    with pytest.raises(KeyError):
        plan.role_of(3)


@pytest.mark.parametrize(
    ("written", "ranks"),
    [(3, (3,)), ([1, 0], (0, 1)), ("0-1,3", (0, 1, 3)), ("2", (2,)), ("3,0-1", (0, 1, 3)), ("1-1", (1,))],
)
def test_ranks_can_be_written_in_three_ways(written: Any, ranks: tuple[int, ...]) -> None:
    data = small()
    data["run"] = {"finish": "artifacts"}
    del data["coordinator"]
    data["artifacts"] = [{"name": "r", "path": "r"}]
    others = sorted(set(range(4)) - set(ranks))
    data["roles"] = {
        "a": {"ranks": written, "command": ["a"]},
        "b": {"ranks": others, "command": ["b"]},
    }
    assert parse_plan(data, "p.toml").roles[0].ranks == ranks


def test_the_data_is_left_as_it_was() -> None:
    data = tomllib.loads(FULL)
    before = copy.deepcopy(data)
    parse_plan(data, "p.toml")
    assert data == before


def test_what_slurm_is_asked_for() -> None:
    data = small()
    data["slurm"] = {"time": 90, "partition": "p", "options": ["--mem=0"], "requeue": True}
    assert parse_plan(data, "p.toml").slurm == Slurm(partition="p", time="90", requeue=True, options=("--mem=0",))
    data["slurm"] = {"components": [{"nodes": 1}, {"nodes": 3, "gres": "gpu:8", "options": ["--exclude=a b"]}]}
    assert parse_plan(data, "p.toml").slurm.components == (
        Component(1),
        Component(3, gres="gpu:8", options=("--exclude=a b",)),
    )


def test_the_shutdown_budget() -> None:
    data = small()
    data["roles"]["client"]["grace"], data["roles"]["server"]["grace"] = 5, 7
    data["deadlines"] = {"collect": 11, "finalization": 100}
    assert parse_plan(data, "p.toml").shutdown_budget == 5 + 7 + 11  # nothing is promised: no finalization window
    data["artifacts"] = [{"name": "r", "path": "r"}]
    assert parse_plan(data, "p.toml").shutdown_budget == 5 + 7 + 100 + 11
    del data["coordinator"]
    data["run"] = {"finish": "artifacts"}
    assert parse_plan(data, "p.toml").shutdown_budget == 7 + 100 + 11


def test_plans_are_frozen() -> None:
    plan = parse_plan(small(), "p.toml")
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"  # type: ignore[misc]
    assert not hasattr(plan, "__dict__")


def test_every_field_says_what_it_is_for() -> None:
    known = {**vars(plans), **vars(artifact_table), **vars(slurm_table)}
    shapes = [each for each in known.values() if is_dataclass(each) and isinstance(each, type)]
    assert {shape.__name__ for shape in shapes} == {
        "Role", "FieldRule", "Artifact", "Marker", "Deadlines", "Collect", "Slurm", "Component", "Plan"
    }  # fmt: skip
    for shape in shapes:
        for item in fields(shape):
            assert item.type.__metadata__[0].doc, f"{shape.__name__}.{item.name}"  # type: ignore[union-attr]


def test_the_import_is_light() -> None:
    """Every quick verb imports this module: nothing that costs milliseconds may come along."""
    code = "import sys; before = set(sys.modules); import supervisor.core.plan; print(*set(sys.modules) - before)"
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    heavy = {"asyncio", "difflib", "hashlib", "logging", "msgspec", "pathlib", "socket", "subprocess", "tomllib"}
    assert not heavy & set(shown.stdout.split())


# -------------------------------------------------------------------------------------------------- single mistakes


def at(*keys: str | int) -> Callable[[Any, Any], None]:
    """A setter of one value in plain data; tables on the way are made."""

    def put(data: Any, value: Any) -> None:
        for key in keys[:-1]:
            data = data[key] if isinstance(key, int) else data.setdefault(key, {})
        data[keys[-1]] = value

    return put


ARTIFACT = {"name": "r", "path": "r.json"}
SERVER = ("roles", "server")
PRINTABLE = "a non-empty string without control characters"
SECONDS = "a number of seconds"
CLIMBLESS = "without . or .., empty parts or control characters"
RELATIVE = f"a relative path {CLIMBLESS}"
ABSOLUTE = f"an absolute path, or one that starts with {{run_dir}} or {{logs}}, {CLIMBLESS}"
NAME = "a name of letters, digits, _ and -"
ARGUMENT = "a string without control characters"
KNOWN_WORDS = "{jobid} {run_dir} {logs} {nodes} {coordinator_node}"
RANKS = 'different rank numbers: one (3 is rank 3), a list ([0, 1]) or ranges ("0-1,3")'
NODES = "a number of nodes, 1..65536, or a list of different node names"
ENV = "names of environment variables (ALLOCD_ and SLURM_ are taken)"
OPTION = "an option in one piece (--name=value) that the supervisor does not set itself"

SLURM_OPTION = "an option of sbatch in one piece (--name=value)"
TIME = "a time limit: minutes, or MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS"
ARRAY = 'task numbers of an array: "0-7", "1,3,5", "0-15:4", and "%2" behind them for two at a time'
ONE, THREE = {"nodes": 1}, {"nodes": 3}
BESIDE = "in each [[slurm.components]]"

MISTAKES: list[tuple[tuple[str | int, ...], Any, str, str, str]] = [
    (("job",), 3, "job", "3", "a table with name and nodes"),
    (("job", "name"), "", "job.name", '""', PRINTABLE),
    (("job", "name"), 7, "job.name", "7", PRINTABLE),
    (("job", "name"), "a\x00b", "job.name", '"a\\u0000b"', PRINTABLE),
    (("job", "name"), "a\nb", "job.name", '"a\\nb"', PRINTABLE),
    (("job", "nodes"), 1.5, "job.nodes", "1.5", NODES),
    (("job", "nodes"), True, "job.nodes", "true", NODES),
    (("job", "nodes"), 0, "job.nodes", "0", NODES),
    (("job", "nodes"), 70_000, "job.nodes", "70000", NODES),
    (("job", "nodes"), [], "job.nodes", "[]", NODES),
    (("job", "nodes"), ["a", "b", "c", "a"], "job.nodes", '["a", "b", "c", "a"]', NODES),
    (("job", "nodes"), ["a", "-b", "c", "d"], "job.nodes", '["a", "-b", "c", "d"]', NODES),
    (("job", "nodes"), 3, "job.nodes", "3 for 4 ranks", "at least one node for each rank"),
    (("job", "nodes"), ["a"], "job.nodes", "1 for 4 ranks", "at least one node for each rank"),
    (("job", "nmae"), "x", "job.nmae", "an unknown key", "a known key; did you mean name?"),
    (("job", "zzz"), "x", "job.zzz", "an unknown key", "a known key, one of name, nodes, python"),
    (("jobs",), {}, "jobs", "an unknown key", "a known key; did you mean job?"),
    (("job", "a b\x07"), 1, r'job."a b\u0007"', "an unknown key", "a known key, one of name, nodes, python"),
    (("run", "finish"), "never", "run.finish", '"never"', '"coordinator" or "artifacts"'),
    (("run", "start"), [], "run.start", "[]", '"together" or "each"'),
    (("run", "dir"), "", "run.dir", '""', "a directory (no substitutions; ~ and $ are not expanded in a plan)"),
    (("run", "dir"), "~/r", "run.dir", '"~/r"', "a directory (no substitutions; ~ and $ are not expanded in a plan)"),
    (("run", "dir"), "{jobid}", "run.dir", "{jobid}", "no substitution ({{ is a brace)"),
    (("coordinator",), {}, "coordinator", "an empty table", 'a table with either rank = N or role = "NAME"'),
    (("coordinator", "role"), "client", "coordinator", "a table", 'a table with either rank = N or role = "NAME"'),
    (("coordinator", "rank"), 4, "coordinator.rank", "4", "a rank of one of the roles"),
    (("coordinator", "rank"), -1, "coordinator.rank", "-1", "a rank number, 0..65535"),
    (("coordinator", "rank"), False, "coordinator.rank", "false", "a rank number, 0..65535"),
    (("coordinator",), {"role": "clinet"}, "coordinator.role", '"clinet"', "a role of the plan; did you mean client?"),
    (("coordinator",), {"role": "server"}, "coordinator.role", "3 ranks in role server", "exactly one; else give rank"),
    (("roles",), {}, "roles", "an empty table", f"a table with {NAME} as keys"),
    (("roles", "client"), 1, "roles.client", "1", "a table"),
    (("roles", "a b"), {"ranks": 4, "command": ["x"]}, 'roles."a b"', '"a b"', NAME),
    (("roles", "é"), {"ranks": 4, "command": ["x"]}, r'roles."\u00e9"', r'"\u00e9"', NAME),
    (("roles", "client", "critical"), False, "roles.client.critical", "false", "true: the coordinator is in this role"),
    ((*SERVER, "ranks"), "", "roles.server.ranks", '""', RANKS),
    ((*SERVER, "ranks"), "1-", "roles.server.ranks", '"1-"', RANKS),
    ((*SERVER, "ranks"), "3-1", "roles.server.ranks", '"3-1"', RANKS),
    ((*SERVER, "ranks"), "1-3,2", "roles.server.ranks", '"1-3,2"', RANKS),
    ((*SERVER, "ranks"), "1-99999", "roles.server.ranks", '"1-99999"', RANKS),
    ((*SERVER, "ranks"), "١", "roles.server.ranks", r'"\u0661"', RANKS),
    ((*SERVER, "ranks"), [1, 1], "roles.server.ranks", "[1, 1]", RANKS),
    ((*SERVER, "ranks"), [1, True], "roles.server.ranks", "[1, true]", RANKS),
    ((*SERVER, "ranks"), 1.0, "roles.server.ranks", "1.0", RANKS),
    ((*SERVER, "ranks"), -1, "roles.server.ranks", "-1", RANKS),
    ((*SERVER, "ranks"), "1,3", "roles", "no role for rank 2", "ranks 0..3 without a gap"),
    ((*SERVER, "command"), [], "roles.server.command", "[]", "a list of strings, the program first"),
    ((*SERVER, "command"), "server", "roles.server.command", '"server"', "a list of strings, the program first"),
    ((*SERVER, "command"), ["", "x"], "roles.server.command[0]", '""', "the name of a program"),
    ((*SERVER, "command"), ["a", 1], "roles.server.command[1]", "1", ARGUMENT),
    ((*SERVER, "command"), ["a", "\x1b["], "roles.server.command[1]", r'"\u001b["', ARGUMENT),
    ((*SERVER, "command"), ["a", "{"], "roles.server.command[1]", '"{"', 'braces in pairs (a lone { in "{": write {{)'),
    ((*SERVER, "command"), ["}"], "roles.server.command[0]", '"}"', 'braces in pairs (a lone } in "}": write }})'),
    ((*SERVER, "env"), {"1A": "x"}, "roles.server.env.1A", '"1A"', ENV),
    ((*SERVER, "env"), {"": "x"}, 'roles.server.env.""', '""', ENV),
    ((*SERVER, "env"), {"ALLOCD_X": "x"}, "roles.server.env.ALLOCD_X", '"ALLOCD_X"', ENV),
    ((*SERVER, "env"), {"SLURM_X": "x"}, "roles.server.env.SLURM_X", '"SLURM_X"', ENV),
    ((*SERVER, "env"), {"A": 1}, "roles.server.env.A", "1", ARGUMENT),
    ((*SERVER, "env"), ["A=1"], "roles.server.env", '["A=1"]', f"a table with {ENV} as keys"),
    ((*SERVER, "cwd"), "work", "roles.server.cwd", '"work"', ABSOLUTE),
    ((*SERVER, "cwd"), "/a/../b", "roles.server.cwd", '"/a/../b"', ABSOLUTE),
    ((*SERVER, "grace"), -1, "roles.server.grace", "-1", f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), 3601, "roles.server.grace", "3601", f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), True, "roles.server.grace", "true", f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), "30s", "roles.server.grace", '"30s"', f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), float("nan"), "roles.server.grace", "nan", f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), float("inf"), "roles.server.grace", "inf", f"{SECONDS}, 0..3600"),
    ((*SERVER, "grace"), 10**400, "roles.server.grace", "1" + "0" * 67 + " ...", f"{SECONDS}, 0..3600"),
    ((*SERVER, "critical"), 1, "roles.server.critical", "1", "true or false"),
    ((*SERVER, "may_finish"), "yes", "roles.server.may_finish", '"yes"', "true or false"),
    ((*SERVER, "agent"), True, "roles.server.agent", "true", '"on" or "off"'),
    (("slurm",), 1, "slurm", "1", "a table"),
    (("slurm", "partitoin"), "x", "slurm.partitoin", "an unknown key", "a known key; did you mean partition?"),
    (("slurm", "partition"), "a b", "slurm.partition", '"a b"', "one word"),
    (("slurm", "account"), "-x", "slurm.account", '"-x"', "one word"),
    (("slurm", "qos"), "", "slurm.qos", '""', "one word"),
    (("slurm", "gres"), ["gpu:8"], "slurm.gres", '["gpu:8"]', "one word"),
    (("slurm", "exclusive"), "user", "slurm.exclusive", '"user"', "true or false"),
    (("slurm", "cluster"), "a,b", "slurm.cluster", '"a,b"', "the name of a cluster"),
    (("slurm", "allocctl"), "bin/allocctl", "slurm.allocctl", '"bin/allocctl"', "an absolute path"),
    *((("slurm", "time"), value, "slurm.time", shown, TIME) for value, shown in (
        (0, "0"), (True, "true"), (1.5, "1.5"), ("1h", '"1h"'), (" 5", '" 5"'), ("1-", '"1-"'),
        ("1:2:3:4", '"1:2:3:4"'), ("00:00", '"00:00"'), ("UNLIMITED", '"UNLIMITED"'),
        ("١", r'"\u0661"'), ("5\n", r'"5\n"'),
    )),
    *((("slurm", "array"), value, "slurm.array", shown, ARRAY) for value, shown in (
        (3, "3"), ("", '""'), ("3-1", '"3-1"'), ("1-4%0", '"1-4%0"'), ("1-4:0", '"1-4:0"'), ("1,", '"1,"'),
        ("0-100000", '"0-100000"'), ("1-3 ", '"1-3 "'), ("١", r'"\u0661"'),
    )),
    *((("slurm", "options"), [word], "slurm.options[0]", f'"{word}"', text) for word, text in (
        ("mem=0", SLURM_OPTION), ("--", SLURM_OPTION), ("", SLURM_OPTION),
        ("--wrap=x", f"another option; sbatch's --wrap cannot be given: {TAKEN['wrap']}"),
        ("-o/x", f"another option; sbatch's --output cannot be given: {TAKEN['output']}"),
        ("-Ho/x", f"another option; sbatch's --output cannot be given: {TAKEN['output']}"),
        ("--outp=/x", "another option; write options out (--output)"),
        ("--time=5", "another option; --time has its own place in a plan: slurm.time"),
        ("-pdebug", "another option; --partition has its own place in a plan: slurm.partition"),
        ("-x", "another option; -x lacks its value: write both in one piece (-xVALUE)"),
    )),
    (("slurm", "components"), [{"nodes": 4}], "slurm.components", "one component", "at least two, or none"),
    (("slurm", "components"), [ONE, ONE], "slurm.components", "2 nodes", "4 between them, as in job.nodes"),
    (("slurm", "components"), [ONE, {}], "slurm.components[1].nodes", "nothing", "a number of nodes, 1..65536"),
    (("slurm", "components"), [ONE, {**THREE, "time": 5}], "slurm.components[1].time", "an unknown key",
     "a known key, one of nodes, partition, gres, constraint, exclusive, options"),
    (("slurm",), {"components": [ONE, THREE], "array": "1-2"}, "slurm.array", '"1-2"',
     "no array: Slurm takes none of heterogeneous jobs"),
    (("slurm",), {"components": [ONE, THREE], "gres": "gpu:1"}, "slurm.gres", '"gpu:1" beside components',
     f"gres {BESIDE}"),
    (("slurm",), {"components": [ONE, THREE], "exclusive": True}, "slurm.exclusive", "true beside components",
     f"exclusive {BESIDE}"),
    (("slurm",), {"components": [ONE, THREE], "options": ["--mem=0"]}, "slurm.options", '["--mem=0"] beside components',
     f"options {BESIDE}"),
    ((*SERVER, "srun_options"), ["mpi"], "roles.server.srun_options[0]", '"mpi"', OPTION),
    ((*SERVER, "srun_options"), ["--label"], "roles.server.srun_options[0]", '"--label"', OPTION),
    ((*SERVER, "srun_options"), ["-o", "-v"], "roles.server.srun_options[0]", '"-o"', OPTION),
    ((*SERVER, "srun_options"), ["--het-group=1"], "roles.server.srun_options[0]", '"--het-group=1"', OPTION),
    ((*SERVER, "srun_options"), ["--output=x"], "roles.server.srun_options[0]", '"--output=x"', OPTION),
    ((*SERVER, "comand"), ["x"], "roles.server.comand", "an unknown key", "a known key; did you mean command?"),
    (("marker", "path"), "done", "marker.path", '"done"', ABSOLUTE),
    (("marker", "path"), "{run_dir}/../done", "marker.path", '"{run_dir}/../done"', ABSOLUTE),
    (("marker", "path"), "/tmp/done/", "marker.path", '"/tmp/done/"', ABSOLUTE),
    (("marker", "by"), "me", "marker.by", '"me"', '"supervisor" or "coordinator"'),
    (("marker", "recheck"), 61, "marker.recheck", "61", f"{SECONDS}, 0..60"),
    (("artifacts",), {}, "artifacts", "an empty table", "a list of tables, [[artifacts]]"),
    (("artifacts",), [1], "artifacts[0]", "1", "a table"),
    (("artifacts",), [{"path": "x"}], "artifacts[0].name", "nothing", NAME),
    (("artifacts",), [ARTIFACT, ARTIFACT], "artifacts[1].name", "r again", "another name than artifacts[0]"),
    (("deadlines", "hello"), 0, "deadlines.hello", "0", f"{SECONDS}, 1..3600"),
    (("deadlines", "run"), 0, "deadlines.run", "0", f"{SECONDS}, 1..2592000"),
    (("deadlines", "silence"), 5, "deadlines.silence", "5", f"{SECONDS}, 10..3600"),
    (("deadlines", "finalization"), 4000, "deadlines.finalization", "4000", "a whole number of seconds, 1..3600"),
    (("deadlines", "finalization"), 1.5, "deadlines.finalization", "1.5", "a whole number of seconds, 1..3600"),
    (("deadlines", "finalization"), 120.0, "deadlines.finalization", "120.0", "a whole number of seconds, 1..3600"),
    (("collect", "paths"), "x", "collect.paths", '"x"', "a list of paths"),
    (("collect", "paths"), ["../x"], "collect.paths[0]", '"../x"', f"a path {CLIMBLESS}"),
    (("collect", "paths"), ["{rank}.log"], "collect.paths[0]", "{rank}", f"{KNOWN_WORDS} ({{{{ is a brace)"),
]  # fmt: skip

TWO_NODES = ("path", "the same path for 4 nodes", "{rank} or {node} in the path or the root")
NO_RUN_DIR = "{jobid} {nodes} {coordinator_node} {rank} {node} {role} {concurrency} ({{ is a brace)"
LIKE_SERVER = "a role of the plan; did you mean server?"
FPM: dict[str, Any] = {"contract": "fpm", "path": "b.json", "ranks_per_node": 4}
BASE = "the path of data-parallel rank 0's file, NAME.json, without wildcards"
LOCAL_RANKS = "the number of data-parallel ranks on each node"
NO_FIELDS = ('fields with contract = "fpm"', 'contract = "files", or no fields')
IN_NAMES = "{concurrency} in it, where the results' names hold the concurrency"
EXPECTED_SET = "the list of concurrencies whose results must come"
SWEEP: dict[str, Any] = {"contract": "sweep", "path": "r_{concurrency}.json", "concurrencies": [1, 8]}
ARTIFACT_MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"path": "/etc/x"}, "path", '"/etc/x"', RELATIVE),
    ({"path": "a/../x"}, "path", '"a/../x"', RELATIVE),
    ({"path": ".."}, "path", '".."', RELATIVE),
    ({"path": "a//x"}, "path", '"a//x"', RELATIVE),
    ({"path": "./x"}, "path", '"./x"', RELATIVE),
    ({"path": "x\x7f"}, "path", r'"x\u007f"', RELATIVE),
    ({"path": "{run_dir}/x"}, "path", "{run_dir}", NO_RUN_DIR),
    ({"root": "x"}, "root", '"x"', ABSOLUTE),
    ({"count": 0}, "count", "0", "a number of files, 1..1000000"),
    ({"count": 2}, "count", "2", "1, for the path names one file; or a pattern in the path"),
    ({"per": "rank"}, "per", '"rank"', '"run" or "node"'),
    ({"roles": ["server"]}, "roles", 'roles with per = "run"', 'per = "node", or no roles'),
    ({"per": "node"}, *TWO_NODES),
    ({"per": "node", "path": "{{rank}}_{role}"}, *TWO_NODES),
    ({"per": "node", "roles": ["serve"], "path": "{rank}"}, "roles", '"serve"', LIKE_SERVER),
    ({"per": "node", "roles": [], "path": "{rank}"}, "roles", "[]", "a list of roles"),
    ({"path": "{rank}"}, "path", '{rank} with per = "run"', 'per = "node"'),
    ({"root": "/x/{node}"}, "root", '{node} with per = "run"', 'per = "node"'),
    ({"fields": {"a": {"equals": 1}}}, "fields", 'format = "any"', 'format = "json" or "jsonl" for rules about fields'),
    ({"lines_min": 2, "format": "json"}, "lines_min", 'format = "json"', 'format = "jsonl" for a number of lines'),
    ({"size_min": 9, "size_max": 8}, "size_max", "size_max 8 below size_min 9", "size_max at least size_min"),
    ({"checksums": "/etc/sums"}, "checksums", '"/etc/sums"', RELATIVE),
    ({"checker": []}, "checker", "[]", "a list of strings, the program first"),
    ({"contract": "ftp"}, "contract", '"ftp"', '"files" or "fpm" or "sweep"'),
    ({"legacy": True}, "legacy", 'true with contract = "files"', 'contract = "fpm"'),
    ({"concurrencies": [1]}, "concurrencies", '[1] with contract = "files"', 'contract = "sweep"'),
    ({"path": "r_{concurrency}"}, "path", '{concurrency} with contract = "files"', 'contract = "sweep"'),
    (FPM | {"size_min": 2}, "size_min", '2 with contract = "fpm"', 'contract = "files"'),
    (FPM | {"ranks_per_node": None}, "ranks_per_node", "null", "a number of ranks, 1..4096"),
    ({"contract": "fpm", "path": "b.json"}, "ranks_per_node", "nothing", LOCAL_RANKS),
    (FPM | {"path": "b*.json"}, "path", '"b*.json"', BASE),
    (FPM | {"path": "b"}, "path", '"b"', BASE),
    (FPM | {"mode": "both"}, "mode", '"both"', '"prefill" or "decode" or "agg"'),
    (FPM | {"fields": {"a": {"equals": 1}}}, "fields", *NO_FIELDS),
    (SWEEP | {"concurrencies": [8, 8]}, "concurrencies", "[8, 8]", "each concurrency once"),
    (SWEEP | {"concurrencies": [0]}, "concurrencies[0]", "0", "a whole number, 1..10000000"),
    (SWEEP | {"path": "r.json"}, "path", '"r.json"', IN_NAMES),
    ({"contract": "sweep", "path": "r_{concurrency}"}, "concurrencies", "nothing", EXPECTED_SET),
]  # fmt: skip

NO_LENGTH = "min and max, or length_min and length_max: numbers have no length"
FIELD_MISTAKES: list[tuple[Any, str, str, str]] = [
    ({}, "", "no rule", "exists, equals, min, max, length_min or length_max"),
    (0, "", "0", "a table with exists, equals, min, max, length_min or length_max"),
    ({"c": {"min": 1}}, ".c", "an unknown key", "a known key, one of exists, equals, min, max, length_min, length_max"),
    ({"min": 2, "max": 1}, "", "min 2 above max 1", "min at most max"),
    ({"equals": 5, "min": 6}, "", "equals 5 with min 6", "equals alone"),
    ({"equals": 5, "max": 4.5}, "", "equals 5 with max 4.5", "equals alone"),
    ({"equals": True, "min": 0}, "", "equals true with min 0", "equals alone"),
    ({"equals": "ab", "length_min": 3}, "", 'equals "ab" with length_min 3', "equals alone"),
    ({"equals": 12, "length_max": 3}, "", "equals 12 with length_max 3", "equals alone"),
    ({"min": 1, "length_min": 1}, "", "a length and a number", NO_LENGTH),
    ({"exists": False, "min": 1}, "", "exists = false beside other rules", "exists = false alone"),
    ({"min": True}, ".min", "true", "a finite number"),
    ({"equals": [1]}, ".equals", "[1]", "a string, a finite number, true or false"),
    ({"length_min": 1.5}, ".length_min", "1.5", "a whole number, 0 or more"),
]


@pytest.mark.parametrize(("keys", "value", "key_path", "found", "expected"), MISTAKES)
def test_one_mistake_is_told_once(
    keys: tuple[str | int, ...], value: Any, key_path: str, found: str, expected: str
) -> None:
    data = small()
    at(*keys)(data, value)
    assert complaints(data) == [PlanError(key_path, found, expected)]


@pytest.mark.parametrize(("extra", "key", "found", "expected"), ARTIFACT_MISTAKES)
def test_one_mistake_in_an_artifact(extra: dict[str, Any], key: str, found: str, expected: str) -> None:
    data = small()
    data["artifacts"] = [ARTIFACT | extra]
    assert complaints(data) == [PlanError(f"artifacts[0].{key}", found, expected)]


@pytest.mark.parametrize("extra", [FPM, SWEEP, FPM | {"roles": ["server"]}, SWEEP | {"checker": ["./ok", "{run_dir}"]}])
def test_contracts_of_every_kind(extra: dict[str, Any]) -> None:
    data = small()
    data["artifacts"] = [ARTIFACT | extra]
    [artifact] = parse_plan(data, "p.toml").artifacts
    assert artifact.per_node == (artifact.contract == "fpm")


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ({}, {}, True),
        ({"roles": ["server"]}, {"roles": ["client"]}, True),
        ({"path": "{role}/b.json", "roles": ["server"]}, {"path": "{role}/b.json"}, True),
        ({"path": "{role}/b.json", "roles": ["server"]}, {"path": "{role}/b.json", "roles": ["client"]}, False),
        ({}, {"path": "other.json"}, False),
    ],
)
def test_two_self_benchmarks_write_different_files(first: dict[str, Any], second: dict[str, Any], wrong: bool) -> None:
    data = small()
    data["artifacts"] = [ARTIFACT | FPM | first, ARTIFACT | FPM | second | {"name": "second"}]
    if wrong:
        told = PlanError("artifacts[1].path", "the path of artifacts[0]", "self-benchmarks apart")
        assert complaints(data) == [told]
    else:
        assert len(parse_plan(data, "p.toml").artifacts) == 2


@pytest.mark.parametrize("rule", [{"equals": 5, "min": 5, "max": 5}, {"equals": "ab", "length_min": 2}])
def test_rules_that_a_value_can_meet(rule: dict[str, Any]) -> None:
    data = small()
    data["artifacts"] = [ARTIFACT | {"format": "json", "fields": {"a": rule}}]
    assert parse_plan(data, "p.toml").artifacts[0].fields == {"a": FieldRule(**rule)}


@pytest.mark.parametrize(("rule", "key", "found", "expected"), FIELD_MISTAKES)
def test_one_mistake_in_a_field_rule(rule: Any, key: str, found: str, expected: str) -> None:
    data = small()
    data["artifacts"] = [ARTIFACT | {"format": "json", "fields": {"a.b": rule}}]
    assert complaints(data) == [PlanError(f'artifacts[0].fields."a.b"{key}', found, expected)]


def test_a_wrong_name_does_not_make_its_ranks_missing() -> None:
    data = small()
    data["roles"]["the client"] = data["roles"].pop("client")
    assert complaints(data) == [PlanError('roles."the client"', '"the client"', NAME)]


def test_a_rank_belongs_to_one_role() -> None:
    data = small()
    data["roles"]["server"]["ranks"] = "0-3"
    assert complaints(data) == [
        PlanError("roles.server.ranks", "rank 0, which belongs to role client", "each rank in one role")
    ]


@pytest.mark.parametrize("signal", ["KILL", "SIGKILL", "STOP", "15", "term", "", 15, "SIGSIGTERM"])
def test_a_signal_that_cannot_be_caught_is_no_stop_signal(signal: Any) -> None:
    data = small()
    at(*SERVER, "stop_signal")(data, signal)
    (error,) = complaints(data)
    assert error.key_path == "roles.server.stop_signal"
    assert error.expected.startswith("one of HUP, INT, QUIT")


@pytest.mark.parametrize(
    ("section", "key"), [("job", "name"), ("job", "nodes"), ("roles.server", "ranks"), ("roles.server", "command")]
)
def test_a_missing_key_is_named(section: str, key: str) -> None:
    data = small()
    table = data
    for part in section.split("."):
        table = table[part]
    del table[key]
    (error,) = complaints(data)
    assert (error.key_path, error.found) == (f"{section}.{key}", "nothing")


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_data_that_is_no_table(data: Any) -> None:
    (error,) = complaints(data)
    assert error.expected == "a table of tables"


def test_an_empty_plan_lists_what_it_needs() -> None:
    assert [error.key_path for error in complaints({})] == ["job", "roles", "coordinator"]


# ----------------------------------------------------------------------------------------------------- cross rules


def test_no_coordinator() -> None:
    data = small()
    del data["coordinator"]
    data["marker"] = {"by": "coordinator"}
    data["roles"]["server"]["command"] = ["server", "{coordinator_node}"]
    assert complaints(data) == [
        PlanError("coordinator", "nothing", 'a [coordinator] table, or run.finish = "artifacts"'),
        PlanError("marker.by", '"coordinator" in a plan without one', "a [coordinator] table"),
        PlanError(
            "roles.server.command[1]", "{coordinator_node} in a plan without a coordinator", "a [coordinator] table"
        ),
    ]


def test_finish_by_artifacts_needs_one() -> None:
    data = small()
    data["run"] = {"finish": "artifacts"}
    assert complaints(data) == [
        PlanError("run.finish", '"artifacts" in a plan without any', "at least one [[artifacts]] table")
    ]
    data["artifacts"] = [ARTIFACT]
    del data["coordinator"]
    assert parse_plan(data, "p.toml").coordinator is None


def test_a_node_artifact_of_one_node_may_have_a_plain_path() -> None:
    data = small()
    data["artifacts"] = [{**ARTIFACT, "per": "node", "roles": ["client"]}]
    assert parse_plan(data, "p.toml").artifacts[0].path == "r.json"
    data["artifacts"] = [{**ARTIFACT, "per": "node", "root": "{run_dir}/{node}"}]
    assert parse_plan(data, "p.toml").artifacts[0].root == "{run_dir}/{node}"


def test_many_missing_ranks_are_shortened() -> None:
    data = small()
    data["job"]["nodes"] = 65_536
    data["roles"]["server"]["ranks"] = 65_535
    assert complaints(data) == [
        PlanError("roles", "no role for rank 1, 2, 3, 4, 5, 6, 7, 8, ...", "ranks 0..65535 without a gap")
    ]


def test_every_error_is_listed() -> None:
    data = small()
    for put, value in [
        (at("job", "name"), ""),
        (at("job", "nodes"), 2.0),
        (at("roles", "server", "grace"), "long"),
        (at("roles", "server", "ranks"), "0,2"),
        (at("roles", "server", "command"), ["x", "{rnak}"]),
        (at("artifacts"), [{"name": "r", "path": "../x", "per": "node"}, {"name": "r", "path": "x"}]),
        (at("marker", "recheck"), False),
    ]:
        put(data, value)
    with pytest.raises(PlanErrors) as caught:
        parse_plan(data, "p.toml")
    assert str(caught.value).splitlines() == [
        f'p.toml: job.name: found ""; expected {PRINTABLE}',
        f"p.toml: job.nodes: found 2.0; expected {NODES}",
        "p.toml: roles.server.command[1]: found {rnak}; expected {jobid} {run_dir} {logs} {nodes} {coordinator_node}"
        " {rank} {node} {role}; did you mean rank? ({{ is a brace)",
        f'p.toml: roles.server.grace: found "long"; expected {SECONDS}, 0..3600',
        f"p.toml: marker.recheck: found false; expected {SECONDS}, 0..60",
        f'p.toml: artifacts[0].path: found "../x"; expected {RELATIVE}',
        "p.toml: roles.server.ranks: found rank 0, which belongs to role client; expected each rank in one role",
        "p.toml: roles: found no role for rank 1; expected ranks 0..2 without a gap",
        "p.toml: artifacts[1].name: found r again; expected another name than artifacts[0]",
    ]


# --------------------------------------------------------------------------------------------------- substitutions


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ""),
        ("plain", "plain"),
        ("{a}{b}", "1{a}"),  # a value is never read again
        ("{{a}}", "{a}"),
        ("{{{a}}}", "{1}"),
        ("{{{{", "{{"),
        ("x{{y}}{a}", "x{y}1"),
    ],
)
def test_substitute(text: str, result: str) -> None:
    assert substitute(text, {"a": "1", "b": "{a}"}) == result


@pytest.mark.parametrize("text", ["{", "}", "{c}", "{}", "{a}}", "{{a}", "{a b}", "{ a}", "{a{b}}"])
def test_substitute_refuses(text: str) -> None:
    with pytest.raises(SubstitutionError):
        substitute(text, {"a": "1", "b": "2"})


@given(st.text("{}ab"))
def test_a_doubled_brace_is_a_brace(text: str) -> None:
    assert substitute(text.replace("{", "{{").replace("}", "}}"), {}) == text


class AnyWord(dict[str, str]):
    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return ""


@given(st.text("{}ab"))
def test_words_are_those_that_substitution_wants(text: str) -> None:
    try:
        words = words_in(text)
    except SubstitutionError:
        with pytest.raises(SubstitutionError, match="lone"):
            substitute(text, AnyWord())
        return
    substitute(text, dict.fromkeys(words, ""))
    for word in words:
        with pytest.raises(SubstitutionError, match="not known"):
            substitute(text, {each: "" for each in words if each != word})


def test_values() -> None:
    plan = parse_plan(small(), "p.toml")
    nodes = ("n0", "n1", "n2", "n3", "idle")
    run = values_for(plan, jobid="7", run_dir="/r", logs="/r/logs", nodes=nodes, rank=None)
    assert run == {
        "jobid": "7",
        "run_dir": "/r",
        "logs": "/r/logs",
        "nodes": "n0,n1,n2,n3,idle",
        "coordinator_node": "n0",
    }
    of_rank = values_for(plan, jobid="7", run_dir="/r", logs="/r/logs", nodes=nodes, rank=2)
    assert of_rank == run | {"rank": "2", "node": "n2", "role": "server"}
    assert set(of_rank) == {*RUN_WORDS, *RANK_WORDS}


def test_values_need_nodes_and_a_known_rank() -> None:
    plan = parse_plan(small(), "p.toml")
    with pytest.raises(ValueError, match="3 nodes for 4 ranks"):
        values_for(plan, jobid="7", run_dir="/r", logs="/r", nodes=("a", "b", "c"), rank=None)
    with pytest.raises(KeyError):
        values_for(plan, jobid="7", run_dir="/r", logs="/r", nodes=("a", "b", "c", "d", "e"), rank=4)


def test_a_plan_without_a_coordinator_has_no_node_for_it() -> None:
    plan = Plan("x", 1, (Role("a", (0,), ("a",)),), finish="artifacts")
    values = values_for(plan, jobid="7", run_dir="/r", logs="/r", nodes=("n",), rank=0)
    assert "coordinator_node" not in values


# ---------------------------------------------------------------------------------------------------------- schema


def valid(data: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema()).is_valid(data))


def test_the_schema_is_one_and_accepts_good_plans() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert valid(small())
    assert valid(tomllib.loads(FULL))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("job", "nodes"), 1.5),
        (("job", "nmae"), "x"),
        (("job", "name"), ""),
        ((*SERVER, "grace"), 4000),
        ((*SERVER, "env"), {"SLURM_X": "x"}),
        ((*SERVER, "srun_options"), ["--label"]),
        ((*SERVER, "ranks"), "1-"),
        ((*SERVER, "command"), []),
        (("coordinator",), {"rank": 0, "role": "client"}),
        (("artifacts",), [{"name": "r", "path": "../x"}]),
        (("roles",), {}),
    ],
)
def test_the_schema_refuses_what_one_field_can_know(keys: tuple[str | int, ...], value: Any) -> None:
    data = small()
    at(*keys)(data, value)
    assert not valid(data)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fitting_values = st.sampled_from(
    [0, 1, 2.5, 60, "a", "/x", "1-2", "{rank}", "{{", "TERM", "json", ["a"], ["-v"], True, {}]
)
PLACES = sorted({keys for keys, *_ in MISTAKES}, key=str)


@given(st.lists(st.tuples(st.sampled_from(PLACES), fitting_values | json_values), min_size=1, max_size=4))
def test_no_value_breaks_the_reader(changes: list[tuple[tuple[str | int, ...], Any]]) -> None:
    """Whatever stands anywhere, the answer is a plan or a list of errors, each with a place and printable words."""
    data = tomllib.loads(FULL)
    for keys, value in changes:
        try:
            at(*keys)(data, value)
        except (TypeError, AttributeError):
            continue  # an earlier change took the table away
    try:
        plan = parse_plan(data, "p.toml")
    except PlanErrors as caught:
        errors = caught.errors
    else:
        assert set(plan.ranks) == set(range(plan.size))
        assert asdict(plan)["name"] == plan.name
        assert valid(data), "the schema refuses what the rules accept"
        return
    assert errors
    for error in errors:
        assert error.key_path
        assert error.found
        assert error.expected
        assert error.text("p.toml").isprintable()
