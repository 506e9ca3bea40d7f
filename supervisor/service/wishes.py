"""Requests that are to be accepted: checked here, so that whoever asks is told at once what cannot be. `usual` are the
variables of a request that brings none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from supervisor.core import kept_events as ev
from supervisor.core.fields import PlanErrors
from supervisor.core.plan import Plan
from supervisor.core.sbatch_options import Misfit
from supervisor.core.slurm import CONFIGURATION, parse_job_id
from supervisor.core.submission import submission_environment
from supervisor.runs.ordering import Terms, Unfit, terms
from supervisor.runs.plans import plan_of
from supervisor.service.book import PLAN, REQUEST
from supervisor.service.interface import AdoptRequest, Document, Refusal, SubmitRequest
from supervisor.service.problems import mistakes


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that can be accepted: its first event and the files of its book."""

    event: ev.Accepted
    files: Mapping[str, str]


def submission(request: SubmitRequest, usual: Mapping[str, str]) -> Wish:
    """A plan that sbatch may take. Blocks. Raises Refusal."""
    environ = request.environ or usual
    _check_reach(environ, usual)
    plan = _plan(request.plan, environ)
    try:
        found, _ = terms(
            plan,
            environ,
            directory=request.directory,
            cwd=request.cwd,
            allocctl=request.allocctl,
            cluster=request.cluster,
            options=request.options,
        )
        found.order(plan)
    except (Misfit, Unfit) as error:
        raise Refusal(422, "unfit", str(error)) from None
    event = ev.Accepted("submitted", plan.name, cluster=found.cluster or "")
    return Wish(event, {PLAN: request.plan, REQUEST: _terms_text(found)})


def adoption(request: AdoptRequest, usual: Mapping[str, str]) -> Wish:
    """A plan for a job that is there. Blocks. Raises Refusal."""
    environ = request.environ or usual
    _check_reach(environ, usual)
    plan = _plan(request.plan, environ)
    try:
        jobid = parse_job_id(request.jobid).allocation
    except ValueError as error:
        raise Refusal(422, "invalid", str(error)) from None
    asked = {**asdict(request), "jobid": jobid, "environ": submission_environment(environ)}
    return Wish(ev.Accepted("adopted", plan.name, jobid=jobid), {PLAN: request.plan, REQUEST: json.dumps(asked)})


def identity(request: SubmitRequest | AdoptRequest) -> Document:
    """What makes it the same request: not the environment, of which no two shells have the same."""
    return {name: value for name, value in asdict(request).items() if name != "environ"}


def _check_reach(environ: Mapping[str, str], usual: Mapping[str, str]) -> None:
    """The job must be where it will be asked about, and cancelled: ids mean other jobs elsewhere. Raises Refusal."""
    for name in CONFIGURATION:
        asked, ours = environ.get(name, ""), usual.get(name, "")
        if asked != ours:
            here = f"{name} is {asked or 'not set'} where this was asked for, and {ours or 'not set'} for allocd"
            text = (
                "which would ask another Slurm about the job: set the same, type `allocctl service install` with it, or"
            )
            raise Refusal(422, "unfit", f"{here}, {text} use `--direct`, which needs no allocd")


def _plan(text: str, environ: Mapping[str, str]) -> Plan:
    """Raises Refusal."""
    try:
        return plan_of(text, "plan", environ)
    except PlanErrors as error:
        raise Refusal(422, "invalid", str(error), errors=mistakes(error.errors)) from None


def _terms_text(found: Terms) -> str:
    values = {name: getattr(found, name) for name in ("base", "allocctl", "cluster", "options", "cwd")}
    return json.dumps({**values, "environ": dict(found.environ)})
