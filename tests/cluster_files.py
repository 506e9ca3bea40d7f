"""The files, programs and ports of a test cluster; `cluster.py` starts what is written here.

`{words}` in the texts are filled in by `write_files`. Why slurm.conf and slurmdbd.conf are not what Slurm
does by default:

* `proctrack/linuxproc`, `task/none`, `CgroupPlugin=disabled`: no cgroup, neither root nor systemd is needed.
* `config_overrides`: the 8 CPUs of each node are believed on a machine with fewer.
* `AccountingStoragePass`: without it slurmctld goes to slurmdbd by the system's munge, and is refused.
* `StorageHost=127.0.0.1`: for `localhost` the client library looks for the system's own database socket.
* `cred_expire`: also the time after which a requeued job may start again (120 s by default).
* `sched_interval=1,sched_min_interval=0`: a batch job starts within a second. slurmctld reads them only three
  seconds after its start: the first batch job waits that long.
* `bf_interval=1`: heterogeneous jobs are started by the backfill scheduler alone, which looks every 30 s by default.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

NODES = ("node1", "node2", "node3", "node4")

# Every program that a cluster needs, with the Debian package that brings it.
_PROGRAMS = {
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "slurmstepd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "scancel": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "squeue": "slurm-wlm",
    "sacct": "slurm-wlm",
    "sacctmgr": "slurm-wlm",
}
_DATABASE_PLUGIN = "accounting_storage_mysql.so"

_SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=10
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={dir}/task_prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=3
MinJobAge=10
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={munge}
JobAcctGatherType=jobacct_gather/linux
NodeName=DEFAULT CPUs=8 RealMemory=4000
NodeName=node[1-4] NodeAddr=127.0.0.1 NodeHostname={host} Port=[{node_port}-{last_port}]
PartitionName=DEFAULT Nodes=ALL DefaultTime=10
PartitionName=main Default=YES PriorityTier=1 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high PriorityTier=10 PreemptMode=OFF
{extra}
"""

_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser={user}
LogFile={dir}/log/slurmdbd.log
PidFile={dir}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db_port}
StorageLoc=slurm_acct_db
StorageUser=slurm
StoragePass={password}
"""

# MariaDB makes a root account without a password: on a port of the loopback address that is an open door for
# every user of the machine, so it goes as soon as ours is there.
_DATABASE_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
DELETE FROM mysql.global_priv WHERE User NOT IN ('slurm', 'mariadb.sys');
FLUSH PRIVILEGES;
"""

# The database is thrown away with its cluster: nothing in it has to survive a crash.
DATABASE_OPTIONS = (
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--skip-innodb-doublewrite",
    "--skip-log-bin",
    "--skip-name-resolve",
)

_TASK_PROLOG = """\
#!/bin/sh
# What a task prolog prints after the word print appears on the task's standard output.
[ -f {dir}/noisy ] || exit 0
while IFS= read -r line; do printf 'print %s\\n' "$line"; done < {dir}/noisy
"""


def missing() -> str | None:
    """Why no cluster can run here, naming what to install; None when it can."""
    packages = {package for program, package in _PROGRAMS.items() if which(program) is None}
    if not list(Path("/usr/lib").glob(f"*/slurm*/{_DATABASE_PLUGIN}")):
        packages.add("slurm-wlm-mysql-plugin")
    if packages:
        return f"no Slurm cluster can run here: install Debian's {' '.join(sorted(packages))}"
    try:
        user()
    except KeyError:
        return f"no Slurm cluster can run here: uid {os.getuid()} has no name in /etc/passwd"
    return None


def user() -> str:
    """The name of who runs this, from the password database: LOGNAME and USER survive a change of user."""
    return pwd.getpwuid(os.getuid()).pw_name


def daemon_env() -> dict[str, str]:
    """The daemons' small environment; Debian has their programs in /usr/sbin, not on everybody's PATH."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin:/sbin"])
    return {"PATH": path, "LC_ALL": "C.UTF-8", "HOME": os.environ.get("HOME", "/")}


def which(program: str) -> str | None:
    """Where a daemon's or client's program is."""
    return shutil.which(program, path=daemon_env()["PATH"])


def write_files(directory: Path, name: str, ports: range, extra: str) -> None:
    """Everything that the daemons read, into an empty directory; `ports` as `reserve_ports` gave them."""
    for part in ("db", "jobs", "log", "munge", "run", "state", "spool", "tmp"):
        (directory / part).mkdir()
    db_port, dbd_port, ctld_port, node_port, *_ = ports
    values = {
        "dir": str(directory),
        "name": name,
        "host": socket.gethostname().split(".")[0],
        "user": user(),
        "munge": str(directory / "munge" / "s"),
        "password": secrets.token_hex(16),
        "db_port": db_port,
        "dbd_port": dbd_port,
        "ctld_port": ctld_port,
        "node_port": node_port,
        "last_port": ports[-1],
        "extra": extra,
    }
    _write(directory / "munge.key", secrets.token_bytes(1024), 0o400)
    for file, text, mode in (
        ("slurmdbd.conf", _SLURMDBD_CONF, 0o600),
        ("database.sql", _DATABASE_SQL, 0o600),
        ("slurm.conf", _SLURM_CONF, 0o644),
        ("task_prolog", _TASK_PROLOG, 0o755),
    ):
        _write(directory / file, text.format_map(values).encode(), mode)
    if _slurm_version() >= (23, 11):  # needed by 24.11, and 22.05 refuses to start with it
        _write(directory / "cgroup.conf", b"CgroupPlugin=disabled\n", 0o644)


def _slurm_version() -> tuple[int, int]:
    words = subprocess.run(
        [which("slurmctld") or "slurmctld", "-V"], capture_output=True, text=True, timeout=10, check=True
    )
    major, minor, *_ = words.stdout.split()[-1].split(".")  # slurm-wlm 22.05.8
    return int(major), int(minor)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file that was never more open than `mode`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    path.chmod(mode)  # whatever the umask took away


def reserve_ports() -> tuple[range, socket.socket]:
    """Free ports in a row (database, slurmdbd, slurmctld, one a node), and the lock that keeps others off.

    They lie below the range from which the kernel gives ports to clients, so that no connection takes one
    between this look and the daemon's bind. The lock is an abstract Unix socket: it leaves no file, and ends
    with its holder.
    """
    while True:
        first = 10_000 + 10 * secrets.randbelow(2_000)
        ports = range(first, first + 3 + len(NODES))
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0allocd-test-cluster-{first}")
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
        else:
            return ports, lock
