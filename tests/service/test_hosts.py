"""Login nodes that share $HOME: two names of this machine, each in a UTS namespace, and a real allocd on each.

They share a kernel, so here a lock tells what between machines the record alone may tell: where a network file system
knows no locks. A second mount by FUSE, which has locks of its own, is such a file system.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from supervisor.core import codes
from supervisor.service.place import OWNER
from tests.fake_slurm import FakeSlurm
from tests.mounts import two_mounts
from tests.service.host import ALLOCD, Host
from tests.service.running import ALLOCCTL

pytestmark = pytest.mark.slow

NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--uts"]


@functools.cache
def missing() -> str:
    """Why nobody can take another name here; "" when that is possible."""
    done = subprocess.run([*NAMESPACE, "hostname", "login1"], capture_output=True, text=True, check=False)
    return done.stderr.strip()


class LoginNode(Host):
    """A login node with a name. Each has a runtime directory of its own, and $HOME is everybody's."""

    def __init__(self, name: str, top: Path, runtime: str, slurm: FakeSlurm) -> None:
        foreign = ("SLURM", "ALLOCD", "XDG", "STATE_DIRECTORY")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        own = {"PATH": slurm.path, "HOME": str(top / "home"), "XDG_RUNTIME_DIR": runtime}
        super().__init__(top, {**kept, **own}, Path(runtime, "allocd/ctl.sock"))
        self.name = name
        self.state = top / "home/.local/state/allocd/hosts" / name
        self.words = (*NAMESPACE, "sh", "-c", 'hostname "$0" && exec "$@"', name)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command that is typed there."""
        env = {**self.environ, **environ}
        return subprocess.run(
            [*self.words, *words], env=env, cwd=self.top, capture_output=True, text=True, timeout=60, check=False
        )

    def allocctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(ALLOCCTL, *words)

    def owner(self, state: Path | None = None) -> dict[str, object]:
        found: dict[str, object] = json.loads(((state or self.state) / OWNER).read_text())
        return found


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Callable[[str], LoginNode]]:
    """Makes login nodes."""
    if why := missing():
        pytest.skip(f"no other name can be taken here: {why}")
    (tmp_path / "home").mkdir()
    slurm = FakeSlurm(tmp_path / "slurm")
    with ExitStack() as stack:

        def make(name: str) -> LoginNode:
            runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="l-"))  # a socket's path is short
            node = LoginNode(name, tmp_path, runtime, slurm)
            stack.callback(lambda: node.process and node.end(signal.SIGKILL))
            return node

        yield make


def test_each_has_its_own_state_and_a_verb_on_the_wrong_one_names_the_right_one(
    login: Callable[[str], LoginNode],
) -> None:
    one, two = login("login1"), login("login2")
    one.start()
    assert one.owner()["host"] == "login1"
    key = one.submit("first")
    one.until(key, "running", "pending")
    for verb in ("status", "explain", "receipt", "artifacts", "collect", "verify", "logs", "wait", "watch", "stop"):
        done = two.allocctl(verb, key)
        assert done.stderr.count("login1") == 1 and done.returncode == codes.UNREACHABLE, f"{verb}: {done}"
    for words, code in ((("list",), codes.OK), (("watch",), codes.UNREACHABLE), (("service", "stop"), codes.OK)):
        done = two.allocctl(*words)
        assert "login1" in done.stderr + done.stdout and done.returncode == code, f"{words}: {done}"
    assert not two.state.exists()

    two.start()
    assert [node.ask("GET", "/v1/health")["host"] for node in (one, two)] == ["login1", "login2"]
    assert two.owner()["host"] == "login2"
    other = two.submit("first")  # the same idempotency key is another request's there
    assert [each["key"] for each in one.ask("GET", "/v1/allocations")["allocations"]] == [key]
    assert [each["key"] for each in two.ask("GET", "/v1/allocations")["allocations"]] == [other]
    unknown = two.allocctl("status", key)
    assert (unknown.returncode, "login1" in unknown.stderr) == (codes.UNREACHABLE, True), unknown

    assert two.end()[0] == codes.OK
    assert not (two.state / OWNER).exists()
    assert one.get(key)["state"] != "ended"
    assert one.end()[0] == codes.OK


@pytest.mark.parametrize("locks", [True, False])
def test_one_state_directory_is_one_daemons(locks: bool, login: Callable[[str], LoginNode], tmp_path: Path) -> None:
    one, two = login("login1"), login("login2")
    with ExitStack() as stack:
        here = there = tmp_path / "state"
        if not locks:
            timeouts = {"negative_timeout": 0, "entry_timeout": 0, "attr_timeout": 0}
            here, there = stack.enter_context(two_mounts(tmp_path, **timeouts))
        one.environ |= {"STATE_DIRECTORY": str(here)}
        two.environ |= {"STATE_DIRECTORY": str(there)}
        one.start()
        key = one.submit("first")
        record = one.owner(here)

        refused = two.run(*ALLOCD)
        assert refused.returncode == codes.UNREACHABLE and f"process {record['pid']}" in refused.stderr, refused
        assert "login1" in refused.stderr
        assert one.get(key)["key"] == key and one.owner(here) == record

        one.end(signal.SIGKILL)  # nobody on login2 can know that
        refused = two.run(*ALLOCD)
        assert refused.returncode == codes.UNREACHABLE, refused
        assert f"remove {there / OWNER} if that machine or its allocd is gone" in refused.stderr
        assert one.owner(here) == record

        (there / OWNER).unlink()
        two.start()
        assert two.get(key)["key"] == key
        assert two.end()[0] == codes.OK
