"""What is there before the first step: a directory of the run's own, nothing in the way, and a marker that is ours."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.plan import Plan, parse_plan
from supervisor.engine import prepare as module
from supervisor.engine.markers import note_path
from supervisor.engine.prepare import Prepared, Unfit, layout_for, local_attempt, local_nodes, prepare, slurm_nodes

Prepare = Callable[..., Prepared]


def plan_of(nodes: int | list[str] = 2, **tables: Any) -> Plan:
    roles = {"worker": {"ranks": [0, 1], "command": ["true"]}}
    data = {"job": {"name": "x", "nodes": nodes}, "coordinator": {"rank": 1}, "roles": roles, **tables}
    return parse_plan(data, "plan.toml")


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Prepare]:
    """Prepares runs in `runs`; what they hold is given back at the end."""
    made: list[Prepared] = []

    def make(
        plan: Plan | None = None, text: str = "a plan", attempt: str = "run-1", base: str | None = None
    ) -> Prepared:
        made.append(prepare(plan or plan_of(), text, base or str(tmp_path / "runs"), attempt, "12", ("n1", "n2")))
        return made[-1]

    yield make
    for one in made:
        for descriptor in one.held:
            os.close(descriptor)


def test_everything_that_a_run_needs_is_in_its_directory(prepared: Prepare, tmp_path: Path) -> None:
    layout = prepared(text="größer = 1").layout
    run_dir = tmp_path / "runs/run-1"
    assert layout.run_dir == str(run_dir)
    assert sorted(os.listdir(run_dir)) == [".bench_done.12.lock", "agent.pyz", "logs", "marker.sh", "plan.toml"]
    assert stat.S_IMODE((run_dir / "plan.toml").stat().st_mode) == 0o600
    assert (run_dir / "plan.toml").read_text() == "größer = 1"
    assert zipfile.is_zipfile(run_dir / "agent.pyz")
    subprocess.run(["sh", "-n", str(run_dir / "marker.sh")], check=True)


def test_further_runs_of_an_attempt_have_directories_of_their_own(prepared: Prepare) -> None:
    layouts = [prepared().layout for _ in range(3)]
    assert [layout.run_id for layout in layouts] == ["run-1", "run-1.s2", "run-1.s3"]
    assert [layout.jobid for layout in layouts] == ["12"] * 3
    assert len({layout.nonce for layout in layouts}) == 3


def test_an_attempt_has_an_end(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 2)
    prepared()
    with pytest.raises(Unfit, match="has 2 runs of run-1 already"):
        prepared()


def test_a_run_directory_is_held_open(prepared: Prepare) -> None:
    """By which others know that its engine lives. No child inherits it."""
    one = prepared()
    descriptor, *_ = one.held
    assert os.path.samestat(os.fstat(descriptor), os.stat(one.layout.run_dir))
    assert not os.get_inheritable(descriptor)


def test_directories_of_promised_files_are_made(prepared: Prepare, tmp_path: Path) -> None:
    """In the run directory only: elsewhere is none of our business."""
    outside = tmp_path / "outside"
    artifacts = [
        {"name": "a", "path": "deep/er/*/x.json"},
        {"name": "b", "path": "r{rank}/x.json", "per": "node"},
        {"name": "c", "root": str(outside), "path": "deep/x.json"},
    ]
    run_dir = Path(prepared(plan_of(artifacts=artifacts)).layout.run_dir)
    assert {path.name for path in run_dir.iterdir() if path.is_dir()} == {"logs", "deep", "r0", "r1"}
    assert list((run_dir / "deep/er").iterdir()) == []
    assert not outside.exists()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "dangling link"])
def test_outputs_that_exist_before_are_refused(prepared: Prepare, tmp_path: Path, make: Callable[[Path], None]) -> None:
    plan = plan_of(artifacts=[{"name": "a", "root": str(tmp_path), "path": "out-{jobid}*"}])
    output = tmp_path / "out-12.json"
    make(output)
    with pytest.raises(Unfit, match=r"exist before the run: .*out-12\.json: move them away first"):
        prepared(plan)
    assert os.path.lexists(output)
    assert list((tmp_path / "runs").iterdir()) == []  # nothing of the refused run is left


def test_of_many_outputs_the_first_few_are_named(prepared: Prepare, tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"out-{number}").touch()
    plan = plan_of(artifacts=[{"name": "a", "root": str(tmp_path), "path": "out-*"}])
    with pytest.raises(Unfit, match="out-4 and 4 more"):
        prepared(plan)


@pytest.mark.parametrize("what", ["agent_archive", "_write"])
def test_a_disk_that_is_full_leaves_nothing(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, what, full)
    with pytest.raises(Unfit, match="No space left on device: choose another place with --dir"):
        prepared()
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "after"), [((100, 200), (136, 200)), ((100, -1), (136, -1)), ((200, 200), None), ((-1, -1), None)]
)
def test_there_are_enough_descriptors(
    prepared: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    after: tuple[int, int] | None,
) -> None:
    """The soft limit is raised, but only if it must be: ranks inherit it."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: asked.append(wanted))
    monkeypatch.setattr(module, "OWN_DESCRIPTORS", 100)
    monkeypatch.setattr(module, "RANK_DESCRIPTORS", 18)
    prepared()
    assert asked == ([] if after is None else [after])


def test_too_few_descriptors_are_told(prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (50, 60))
    with pytest.raises(Unfit, match="2 ranks need 76 open files, but the limit is 60"):
        prepared()
    assert not (tmp_path / "runs").exists()


# --- the marker ----------------------------------------------------------------------------------------------------


def marked(tmp_path: Path) -> Plan:
    return plan_of(marker={"path": str(tmp_path / "elsewhere/marker")})


def test_a_marker_elsewhere_is_claimed_as_long_as_we_live(prepared: Prepare, tmp_path: Path) -> None:
    prepared(marked(tmp_path))
    ask = (
        "import fcntl, sys\n"
        "try: fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(3)\n"
    )
    lock = str(tmp_path / "elsewhere/marker.lock")
    assert subprocess.run([sys.executable, "-c", ask, lock], check=False).returncode == 3


def test_a_claim_that_is_refused(prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "lockf", taken)
    with pytest.raises(Unfit, match=r"is used by a run that lives: name another one \(marker.path\)"):
        prepared(marked(tmp_path))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_system_without_locks_is_noted(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", none)
    (note,) = prepared(marked(tmp_path)).notes
    assert "nothing keeps a second run from using the same marker" in note


def test_the_lock_is_not_put_through_a_link(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/marker.lock").symlink_to(tmp_path / "trap")
    with pytest.raises(Unfit, match=r"marker\.lock"):
        prepared(marked(tmp_path))
    assert not (tmp_path / "trap").exists()


def test_an_earlier_attempts_marker_and_note_are_set_aside(prepared: Prepare, tmp_path: Path) -> None:
    marker = tmp_path / "elsewhere/marker"
    note = Path(note_path(marker))
    marker.parent.mkdir()
    marker.write_text("0\n")
    note.write_text("5\n")
    notes = prepared(marked(tmp_path)).notes
    assert len(notes) == 2
    assert not marker.exists()
    assert not note.exists()
    assert (marker.parent / "marker.before.run-1").read_text() == "0\n"


# --- nodes, ids ----------------------------------------------------------------------------------------------------


def test_the_nodes_of_an_allocation() -> None:
    assert slurm_nodes(plan_of(2), ["n1", "n2", "n3"]) == ("n1", "n2")
    assert slurm_nodes(plan_of(["n3", "n1"]), ["n1", "n2", "n3"]) == ("n3", "n1")
    with pytest.raises(Unfit, match="wants 2 nodes, but the allocation has 1"):
        slurm_nodes(plan_of(2), ["n1"])
    with pytest.raises(Unfit, match="names n9, but the allocation has n1,n2"):
        slurm_nodes(plan_of(["n1", "n9"]), ["n1", "n2"])


def test_each_local_node_has_an_address_of_its_own() -> None:
    assert local_nodes(plan_of(["a", "b"])) == ("a", "b")
    nodes = local_nodes(plan_of(600))
    assert len(set(nodes)) == 600
    assert nodes[:2] == ("127.0.0.1", "127.0.0.2")
    assert all(0 < int(part) < 255 for node in nodes for part in node.split(".")[3:])


def test_ids_of_local_runs_differ() -> None:
    assert len({local_attempt() for _ in range(5)}) == 5


def test_a_layout_for_show_makes_nothing(tmp_path: Path) -> None:
    layout = layout_for(plan_of(), str(tmp_path / "runs"), "run-1", "12", ("n1", "n2"))
    assert layout.run_dir == str(tmp_path / "runs/run-1")
    assert list(tmp_path.iterdir()) == []
