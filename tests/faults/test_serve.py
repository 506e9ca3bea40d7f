"""`allocctl run --serve`: a run that answers for itself while it runs, is stopped over its socket, and leaves none."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.local import LIMIT, SERVE, Local, Run, role, sh, until

pytestmark = pytest.mark.slow


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A path that a socket's fits behind: 107 bytes are all that Linux takes."""
    with tempfile.TemporaryDirectory(prefix="s-") as directory:
        yield Path(directory)


class Connection(http.client.HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=LIMIT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT)
        self.sock.connect(self._path)


def ask(path: str, method: str, target: str, body: Any = None) -> tuple[int, Any]:
    """A request and its answer, which is JSON."""
    with closing(Connection(path)) as connection:
        data = None if body is None else json.dumps(body)
        connection.request(method, target, data, {"Content-Type": "application/json"} if data else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def reading(path: str, target: str) -> Iterator[http.client.HTTPResponse]:
    """A stream."""
    with closing(Connection(path)) as connection:
        connection.request("GET", target)
        with connection.getresponse() as answer:
            yield answer


def started(local: Local, tmp_path: Path, **env: str) -> tuple[Run, str]:
    """A run of a worker and a coordinator that waits, and its socket."""
    plan = local.plan({"worker": role(0, SERVE), "client": role(1, sh("echo hello; exec sleep 1000"))}, coordinator=1)
    run = local.start(plan, "--serve", env={"XDG_RUNTIME_DIR": str(tmp_path), **env})
    run.wait_file("ctl.path")
    return run, (run.directory / "ctl.path").read_text().rstrip("\n")


def test_a_run_answers_for_itself_until_it_is_stopped(local: Local, tmp_path: Path) -> None:
    run, path = started(local, tmp_path)
    run_id = run.directory.name
    assert path == f"{tmp_path}/allocd/run-{run_id}.sock"
    assert f"answers on {path}" in run.stderr
    status, found = ask(path, "GET", "/v1/allocations")
    assert (status, [item["key"] for item in found["allocations"]]) == (200, [run_id])
    run.first("RankStarted", rank=1)
    status, shown = ask(path, "GET", f"/v1/allocations/{run_id}")
    assert (shown["kind"], shown["state"], shown["run_dir"]) == ("served", "running", str(run.directory))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert ask(path, "GET", "/v1/health")[1]["pid"] == run.process.pid
    assert ask(path, "GET", f"/v1/allocations/{run_id}/receipt")[0] == 404
    assert ask(path, "POST", "/v1/follows", {"jobid": "1"})[1]["kind"] == "unsupported"
    assert ask(path, "POST", f"/v1/allocations/{run_id}/stop", {"how": "cancel"})[0] == 501
    with (
        reading(path, f"/v1/allocations/{run_id}/events") as events,
        reading(path, f"/v1/allocations/{run_id}/logs?rank=1&kind=out&follow=true") as logs,
    ):
        assert logs.readline() == b"hello\n"
        for _ in range(2):  # the second changes nothing: a grace is a grace
            assert ask(path, "POST", f"/v1/allocations/{run_id}/stop", {"how": "stop"})[1]["stopping"] == "stop"
        told = [json.loads(line[6:]) for line in events.read().splitlines() if line.startswith(b"data: ")]
        assert logs.read() == b""
    assert run.code == 143
    assert len(run.events("StopRequested")) == 1
    lines = [line for line in run.lines() if "event" in line]
    assert [(item["seq"], item["data"]["record"]) for item in told[:-1]] == [
        (line["seq"], line["event"]) for line in lines
    ]
    assert (told[-1]["kind"], told[-1]["data"]["verdict"]["code"]) == ("ended", 143)
    assert not os.path.lexists(path)
    assert not (run.directory / "ctl.path").exists()
    assert "Traceback" not in run.stderr


def test_where_no_session_directory_is_the_socket_is_under_tmpdir(local: Local, tmp_path: Path) -> None:
    run, path = started(local, tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "absent"), TMPDIR=str(tmp_path))
    assert path == f"{tmp_path}/allocd-{os.geteuid()}/run-{run.directory.name}.sock"
    with reading(path, "/metrics") as metrics:
        assert b'allocd_allocations{state="running"} 1.0' in metrics.read()
    assert ask(path, "POST", f"/v1/allocations/{run.directory.name}/stop", {"how": "stop"})[0] == 202
    assert run.code == 143


def test_a_run_that_cannot_be_served_runs(local: Local, tmp_path: Path) -> None:
    (tmp_path / "allocd").symlink_to(tmp_path)
    plan = local.plan({"client": role(0, sh("until [ -e go ]; do sleep 0.05; done"), cwd=str(tmp_path))}, coordinator=0)
    run = local.start(plan, "--serve", "-q", env={"XDG_RUNTIME_DIR": str(tmp_path)})
    run.first("RankStarted")
    until(lambda: "this run is not served" in run.stderr, "a word of it")
    assert "is a symbolic link" in run.stderr
    (tmp_path / "go").touch()
    assert run.code == 0


def test_a_reader_that_does_not_read_does_not_hold_the_runs_end(local: Local, tmp_path: Path) -> None:
    run, path = started(local, tmp_path)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(path)
        deaf.sendall(b"GET /v1/events HTTP/1.1\r\nHost: a\r\n\r\n")
        assert ask(path, "POST", f"/v1/allocations/{run.directory.name}/stop", {"how": "stop"})[0] == 202
        assert run.code == 143


def test_nothing_that_serves_is_imported_before_it_is_needed() -> None:
    code = "import sys, supervisor.service.served; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"uvicorn", "starlette", "h11", "prometheus_client"} & set(done.stdout.split())
