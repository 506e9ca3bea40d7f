"""The socket: where it is, who makes it, who finds another there, and who gets through it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from supervisor.core import codes
from supervisor.service import sockets
from supervisor.service.sockets import Unusable, listen, open_listener, peer_of, runtime_directory
from tests.service.client import ask, connected
from tests.service.world import World, served

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_the_directory_is_made_for_us_alone_and_so_is_the_socket(tmp_path: Path) -> None:
    listener = listen(str(tmp_path / "allocd"))
    try:
        assert listener.path == str(tmp_path / "allocd" / "ctl.sock")
        assert [mode(tmp_path / "allocd"), mode(listener.path)] == [0o700, 0o600]
    finally:
        listener.close()
    assert os.listdir(tmp_path / "allocd") == []
    listener.close()


def test_where_it_is(tmp_path: Path) -> None:
    here, tmp = str(tmp_path), str(tmp_path / "tmp")
    other = f"allocd-{os.geteuid()}"
    assert runtime_directory({"RUNTIME_DIRECTORY": "/run/user/0/allocd:/run/x"}) == "/run/user/0/allocd"
    assert runtime_directory({"XDG_RUNTIME_DIR": here}) == f"{here}/allocd"
    assert runtime_directory({"XDG_RUNTIME_DIR": f"{here}/absent", "TMPDIR": tmp}) == f"{tmp}/{other}"
    assert runtime_directory({"XDG_RUNTIME_DIR": "", "TMPDIR": ""}) == f"/tmp/{other}"
    tmp_path.chmod(0o777)
    assert runtime_directory({"XDG_RUNTIME_DIR": here, "TMPDIR": tmp}) == f"{tmp}/{other}"


@as_root
def test_a_runtime_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    assert not runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)}).startswith(str(tmp_path))


def test_a_path_that_is_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    directory = str(tmp_path / "x")
    directory += "x" * (107 - len("/ctl.sock") - len(directory))
    listen(directory).close()
    with pytest.raises(Unusable, match=r"has 108 bytes, and Linux takes 107") as refused:
        listen(directory + "x")
    assert refused.value.code == codes.CONFIG
    assert not os.path.exists(directory + "x")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: place.symlink_to(place.parent), "is a symbolic link"),
        (lambda place: place.symlink_to("nowhere"), "is a symbolic link"),
        (lambda place: place.touch(), "is no directory"),
        (lambda place: place.mkdir(0o750), r"is open to others \(0750\): chmod 0700"),
        (lambda place: (place.mkdir(0o700), (place / "ctl.sock").symlink_to("x")), "is a symbolic link"),
        (lambda place: (place.mkdir(0o700), (place / "ctl.sock").touch()), "is no socket"),
        (lambda place: (place.mkdir(0o700), (place / "ctl.sock.lock").symlink_to("x")), "is a symbolic link"),
    ],
)
def test_what_is_not_ours_alone_is_refused(tmp_path: Path, spoil: object, message: str) -> None:
    place = tmp_path / "allocd"
    spoil(place)  # type: ignore[operator]
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(Unusable, match=message) as refused:
        listen(str(place))
    assert refused.value.code == codes.CONFIG
    assert set(before) <= set(map(str, tmp_path.rglob("*")))


@as_root
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "allocd").mkdir(0o700)
    os.chown(tmp_path / "allocd", NOBODY, NOBODY)
    with pytest.raises(Unusable, match=f"belongs to uid {NOBODY}"):
        listen(str(tmp_path / "allocd"))


def test_a_directory_is_not_made_below_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be made"):
        listen(str(tmp_path / "no" / "allocd"))
    with pytest.raises(Unusable, match="must be an absolute path"):
        listen("allocd")


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """Its server was killed: the file is there, and nobody behind it."""
    code = f"import os; from supervisor.service.sockets import listen; listen({str(tmp_path / 'a')!r}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    stale = os.lstat(tmp_path / "a" / "ctl.sock")
    assert stat.S_ISSOCK(stale.st_mode)
    listener = listen(str(tmp_path / "a"))
    assert listener.path is not None
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.path)
    listener.close()


def test_a_living_one_is_refused_and_its_owner_named(tmp_path: Path) -> None:
    listener = listen(str(tmp_path / "a"))
    with pytest.raises(Unusable, match=rf"process {os.getpid()} \(\S.*\) answers on .*ctl.sock already") as refused:
        listen(str(tmp_path / "a"))
    assert refused.value.code == codes.UNREACHABLE
    listener.close()
    listen(str(tmp_path / "a")).close()


def test_a_living_one_without_a_lock_is_refused_as_well(tmp_path: Path) -> None:
    """Such as systemd's own."""
    (tmp_path / "a").mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "a" / "ctl.sock"))
        other.listen()
        with pytest.raises(Unusable, match=rf"process {os.getpid()}"):
            listen(str(tmp_path / "a"))


def test_the_lock_of_a_starter_that_has_no_socket_yet_counts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(0o700)
    lock = sockets._locked(str(tmp_path / "a" / "ctl.sock"))
    with pytest.raises(Unusable, match="which has its lock, answers"):
        listen(str(tmp_path / "a"))
    lock.close()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ended between our open and our flock, and removed it; a third may have made it anew since."""
    path = str(tmp_path / "ctl.sock")
    real = os.open
    opened: list[str] = []

    def slow(name: str, *more: int) -> int:
        descriptor = real(name, *more)
        if not opened:
            os.unlink(name)
        opened.append(name)
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    lock = sockets._locked(path)
    assert len(opened) == 2
    assert os.path.samestat(os.fstat(lock.fileno()), os.stat(f"{path}.lock"))
    lock.close()


def test_a_file_that_another_put_there_is_left_at_the_end(tmp_path: Path) -> None:
    listener = listen(str(tmp_path / "a"))
    assert listener.path is not None
    os.unlink(listener.path)
    Path(listener.path).touch()
    listener.close()
    assert os.path.exists(listener.path)


HANDED = """
import os, socket, sys
from supervisor.service.sockets import Unusable, open_listener
os.environ["LISTEN_PID"] = sys.argv[1] or str(os.getpid())
try:
    listener = open_listener(os.environ)
except Unusable as error:
    sys.exit(str(error))
print(listener.path, os.get_inheritable(listener.socket.fileno()), sorted(os.environ.keys() & {"LISTEN_FDS"}))
listener.close()
"""


def handed(given: socket.socket | int, tmp_path: Path, pid: str = "", count: str = "1") -> tuple[str, str]:
    """What a process says of a descriptor that it was given as systemd gives it."""
    number = given if isinstance(given, int) else given.fileno()
    environ = {**os.environ, "LISTEN_FDS": count, "XDG_RUNTIME_DIR": str(tmp_path)}
    shell = f'exec "$0" -c "$1" "$2" 3<&{number}' if number != 3 else 'exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["/bin/bash", "-c", shell, sys.executable, HANDED, pid],
        pass_fds=[number],
        env=environ,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr.strip()


def test_a_socket_that_systemd_hands_over_is_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "given.sock")
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(path)
        assert "no Unix stream socket that listens" in handed(given, tmp_path)[1]
        given.listen()
        assert handed(given, tmp_path)[0] == f"{path} False []"
        assert os.path.exists(path)
        assert "handed over 2 sockets" in handed(given, tmp_path, count="2")[1]
        assert handed(given, tmp_path, pid="1")[0].startswith(f"{tmp_path}/allocd/ctl.sock")
    with open(os.devnull, "rb") as file:
        assert "is no socket" in handed(file.fileno(), tmp_path)[1]


def test_without_systemd_the_socket_is_our_own(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
    listener = open_listener(environ)
    assert listener.path == f"{tmp_path}/allocd/ctl.sock"
    assert environ == {"XDG_RUNTIME_DIR": str(tmp_path)}
    listener.close()


# --- who gets through -------------------------------------------------------------------------------------------------

CALL = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
try:
    client.connect(sys.argv[1])
    client.sendall(b"GET /v1/health HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n")
    print(client.recv(12))
except OSError as error:
    print(type(error).__name__)
"""


async def _as_nobody(path: str) -> str:
    """What another user's client sees. The system's own Python: ours may be where nobody may look."""
    import asyncio

    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    process = await asyncio.create_subprocess_exec(
        python,
        "-I",
        "-c",
        CALL,
        path,
        stdout=asyncio.subprocess.PIPE,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
    )
    out, _ = await process.communicate()
    return out.decode().strip()


def test_the_kernel_tells_who_is_there() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        peer = peer_of(one)
        assert (peer.pid, peer.uid, peer.gid, peer.allowed) == (os.getpid(), os.geteuid(), os.getegid(), True)


@as_root
async def test_another_user_does_not_get_to_the_socket(tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents[: -len(Path(tempfile.gettempdir()).parts)]):
        place.chmod(0o755)
    async with served(World(), tmp_path) as (_, path):
        assert await _as_nobody(path) == "PermissionError"


@as_root
async def test_another_user_who_gets_to_it_is_not_heard(tmp_path: Path) -> None:
    """As if somebody had opened up the directory and the socket since."""
    world = World()
    for place in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        place.chmod(0o755)
    async with served(world, tmp_path) as (server, path):
        (tmp_path / "allocd").chmod(0o755)
        (tmp_path / "allocd" / "ctl.sock").chmod(0o666)
        assert await _as_nobody(path) in ("b''", "ConnectionResetError", "BrokenPipeError")
        assert b"allocd_requests_total{" not in world.metrics()
        assert (await ask(path, "GET", "/v1/health")).status == 200
        async with asyncio.timeout(10):
            while server.connections:  # noqa: ASYNC110 - the server tells no event of it
                await asyncio.sleep(0.005)


async def test_a_client_of_our_own_is_heard(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path), connected(path) as line:
        assert (await line.ask("GET", "/v1/health")).json["kind"] == "world"
