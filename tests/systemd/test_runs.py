"""What becomes of runs when the service is stopped, on a real cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.asking import ask
from tests.cluster import Cluster
from tests.slurm.jobs import SERVE, Jobs, Run, alive, role, until
from tests.systemd.manager import Manager
from tests.systemd.service import Service


@pytest.mark.parametrize("by", ["the daemon", "its books"])
def test_engines_outlive_the_daemon_and_are_ended_in_order_when_that_is_asked_for(
    by: str, systemd: Manager, cluster: Cluster, jobs: Jobs, tmp_path: Path
) -> None:
    service = Service(systemd)
    held = jobs.hold(2)
    plan = jobs.plan({"worker": role(0, SERVE), "client": role(1, SERVE)}, coordinator=1, nodes=2)
    service.do("install", environ=jobs.env)
    body = {
        "plan": plan.read_text(),
        "jobid": str(held.jobid),
        "cwd": str(tmp_path),
        "directory": str(tmp_path / "runs"),
    }
    key = ask(service.path, "POST", "/v1/adoptions", body)["key"]

    def shown() -> dict[str, Any]:
        document: dict[str, Any] = ask(service.path, "GET", f"/v1/allocations/{key}")
        assert document["state"] != "ended", document["verdict"]
        return document

    until(lambda: shown()["state"] == "running" and shown()["run_dir"], "the run")
    run = Run(jobs, held.jobid, tmp_path / "runs", _found=[Path(shown()["run_dir"])])
    run.wait_file("up.0", "up.1")
    engine = run.engine

    assert "was stopped" in service.do("stop")
    assert alive(engine)
    systemd.ask("start", "allocd.socket")
    assert shown()["state"] == "running"
    assert alive(engine)

    if by == "the daemon":
        assert f"{key}: asked to end" in service.do("stop", "--with-runs")
    else:
        assert f"engines of adopted allocations go on: {held.jobid}.s1: " in service.do("uninstall", environ=jobs.env)
        assert alive(engine)
        assert service.do("stop", "--with-runs", environ=jobs.env).startswith(f"{held.jobid}.s1: asked to end\n")
    assert not alive(engine)
    run.wait_file("ended.0", "ended.1")
    verdict = run.receipt("receipt.json")["verdict"]
    assert (verdict["reason"], verdict["final"]) == ("stop_requested", True)
    assert not os.path.exists(service.path)
    assert cluster.job(held.jobid)["JobState"] == "RUNNING"  # it is somebody else's
