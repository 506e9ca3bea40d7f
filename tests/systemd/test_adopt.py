"""Engines of adopted runs in units of their own, on a real cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

from supervisor.service.adopting import alive, stop
from tests.cluster import Cluster
from tests.slurm.jobs import ALLOCCTL, SERVE, Jobs, Run, role, until
from tests.systemd.manager import Manager


def test_an_engine_has_a_unit_of_its_own_and_is_stopped_with_it_in_order(
    systemd: Manager, cluster: Cluster, tmp_path: Path
) -> None:
    jobs = Jobs(cluster, tmp_path)
    held = jobs.hold(2)
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, SERVE)}, coordinator=1, nodes=2)
    odd = tmp_path / "a $HOME %h b"
    words = [ALLOCCTL, "adopt", "--detach", "--json", f"--dir={odd}", str(held.jobid), str(plan)]
    for end in ("unit", "engine", "kill"):
        done = systemd.run(*words, **jobs.env)
        assert done.returncode == 0, done.stderr + systemd.tail()
        started = json.loads(done.stdout)
        run = Run(jobs, held.jobid, odd, _found=[Path(started["run_dir"])])
        run.wait_file("up.0", "up.1")
        unit = started["unit"]
        assert unit.startswith(f"allocd-run-{held.jobid}-")
        assert run.first("RunOpened")["unit"] == unit
        assert systemd.show(unit, "MainPID") == str(started["pid"])
        if end == "unit":
            systemd.ask("stop", unit)
        elif end == "engine":
            assert stop(started["run_dir"])
        else:
            os.kill(started["pid"], 9)
        until(lambda run_dir=started["run_dir"]: alive(run_dir) is False, "the end of the engine")  # type: ignore[misc]
        systemd.wait_for(unit, "LoadState", "not-found")  # collected
        if end != "kill":
            verdict = run.receipt("receipt.json")["verdict"]
            assert (verdict["reason"], verdict["final"]) == ("stop_requested", True)
        run.wait_gone()  # also of an engine that was killed: its sruns are left to tell their agents
    assert cluster.job(held.jobid)["JobState"] == "RUNNING"
    cluster.heal()
