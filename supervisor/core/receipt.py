"""The receipts: what proves a verdict, as plain data (one JSON document each, `schema_version` 1).

`receipt.run.json` is what the engine saw (kind "run"): verdict, first failure, failures, consequences, every rank's
end, marker, artifacts, collection, notes, doubts, timeline, versions. Inside a job its verdict is "first observed".

`receipt.json` (kind "sealed") is made when the job is over, by whoever sees that: the run receipt as it is with its
sha256 (or null where there is none), Slurm's answers as printed, and the verdict over both. That of an "adopted" run,
whose job is somebody else's, is made when Slurm's records of its steps are there (`judge_adopted`). "slurm" is the
truth about the job; of a heterogeneous job that of the component that decides, and "components" holds all (else it
is empty). "known" is what was known of the job besides its id, by which Slurm's record is told from a stranger's.

`replay` derives the verdict again from nothing but what is saved, and says whether it is the saved one. It trusts no
conclusion in the document: failures are read back as failures, Slurm's answers as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from supervisor.core import events as ev
from supervisor.core.answers import Answer
from supervisor.core.identity import (
    NOTHING,
    Known,
    Stranger,
    by_slurms_clock,
    not_of_this_job,
    renamed,
    runs_another_script,
)
from supervisor.core.layout import Layout
from supervisor.core.slurm import FOLD, ExitCode, parse_exit_code, parse_state
from supervisor.core.state import End, Failure, RankState, RunState
from supervisor.core.steps import StepComparison, compare_steps
from supervisor.core.story import timeline
from supervisor.core.truth import Truth, deciding, restarts_of
from supervisor.core.two_books import decide
from supervisor.core.verdict import (
    NATIVE,
    Evidence,
    Verdict,
    class_of,
    evidence_of,
    first_failure,
    judge_adopted,
    judge_run,
    judge_sealed,
    unproven,
)

SCHEMA_VERSION: Final = 1

Document = dict[str, Any]


class NotAReceipt(ValueError):
    """The document is no receipt, or lacks what a verdict is derived from."""


def run_receipt(
    state: RunState,
    records: Sequence[ev.Record],
    layout: Layout,
    *,
    versions: Mapping[str, str],
    journal_trouble: str | None = None,
    engine_lost: bool = False,
) -> Document:
    """What the run shows. `engine_lost`: folded from a journal whose engine left no receipt."""
    opened = state.opened
    assert opened is not None  # noqa: S101 - a run that was not opened has no receipt
    told, ended = timeline(records), records[-1].utc if records else None
    evidence = evidence_of(state, engine_lost=engine_lost, last_word=_last_word(ended, told))
    in_job = opened.launcher == "slurm"
    end, records_of = ("another's business", "records of its steps") if opened.adopted else ("not known yet", "record")
    verdict = judge_run(evidence, final=not in_job)
    first = first_failure(evidence.failures)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        "run_id": opened.run_id,
        "jobid": opened.jobid,
        "name": layout.plan.name,
        "launcher": opened.launcher,
        "adopted": opened.adopted,
        "run_dir": opened.run_dir,
        "nodes": opened.nodes,
        "host": opened.host,
        "started": records[0].utc if records else None,
        "ended": ended,
        "seconds": round(records[-1].at - records[0].at, 3) if records else None,
        "verdict": verdict.as_dict(),
        "job_end": f"{end}: `allocctl verify` seals this receipt with Slurm's {records_of}" if in_job else "no job",
        "status": statuses(state),
        "completed": evidence.completed,
        "engine_lost": engine_lost,
        "decision": asdict(state.decision) if state.decision else None,
        "first_failure": asdict(first) if first else None,
        "failures": [asdict(failure) for failure in state.failures],
        "doubts": list(evidence.doubts),
        "not_collected": list(evidence.not_collected),
        "consequences": [_consequence(rank) for rank in consequences(state)],
        "ranks": [_rank(rank, layout) for rank in state.ranks],
        "marker": {"path": opened.marker, **asdict(state.marker)},
        "artifacts": [asdict(contract) for contract in state.contracts],
        "watches": [
            {"directory": directory, "by": how.by, "file_system": how.file_system, "why": how.why}
            for directory, how in state.watches.items()
        ],
        "collected": asdict(state.collected) if state.collected else None,
        "time_limit": state.end_utc,
        "notes": list(state.notes),
        "journal_trouble": journal_trouble,
        "timeline": told,
        "versions": dict(versions),
    }


def _last_word(ended: str | None, told: Sequence[Document]) -> str:
    """When a journal ends, and with what."""
    return f"{ended}" + (f" ({told[-1]['text']})" if told else "") if ended else ""


def statuses(state: RunState) -> Document:
    """Native, artifact, checker and collection status, each by itself: none hides another."""
    native = [failure for failure in state.failures if class_of(failure) == NATIVE]
    broken: list[object] = [contract for contract in state.contracts if contract.state in ("invalid", "late")]
    broken += [failure for failure in state.failures if failure.what == "artifact"]
    unfinished = [contract for contract in state.contracts if not contract.final]
    fault = any(failure.what == "fault" for failure in state.failures)
    errors = state.collected.errors if state.collected else ["nothing was collected"]
    return {
        "native": "failed" if native else "ok",
        "artifacts": "failed" if broken else "pending" if unfinished else "ok" if state.contracts else "none",
        "checker": "fault" if fault else "ok",
        "collection": "failed" if errors else "ok",
    }


def consequences(state: RunState) -> list[RankState]:
    """The ranks that ended because the run did: stopped by us, or ended after the decision, or never started."""
    decision = state.decision
    if decision is None or decision.reason == "completed":
        return []
    failed = {failure.rank for failure in state.failures if failure.what != "marker"}
    return [rank for rank in state.ranks if rank.rank not in failed and _fell(rank, decision.seq)]


def _fell(rank: RankState, decided: int) -> bool:
    return rank.refused is None if rank.end is None else rank.end.seq > decided


def _consequence(rank: RankState) -> Document:
    unseen = "ended unseen" if rank.started else "was never started"
    how = describe_end(rank.end) if rank.end else unseen
    return {"rank": rank.rank, "role": rank.role, "node": rank.node, "reason": rank.stop, "text": how}


def describe_end(end: End) -> str:
    """How a rank ended, in words."""
    if end.code is not None:
        return f"ended with code {end.code}"
    return f"was killed by signal {end.signal}" + (" (core dumped)" if end.core else "")


def _rank(rank: RankState, layout: Layout) -> Document:
    kinds = ("out", "err", "srun") if rank.agent else ("out", "err")
    return {**asdict(rank), "logs": {kind: layout.log(rank.rank, kind) for kind in kinds}}


# --- sealing and replay ------------------------------------------------------------------------------------------


def sealed_receipt(
    run: Document | None,
    run_sha256: str | None,
    jobid: str,
    truths: Sequence[Truth],
    *,
    versions: Mapping[str, str],
    known: Known = NOTHING,
    doubts: Sequence[str] = (),
) -> Document:
    """The run receipt (None: a job without one) and Slurm's truth, with the verdict over both. `truths`: one, or that
    of each component of a heterogeneous job, in their order. `doubts`: sentences that let nothing count, such as that
    there may be components of which nobody told."""
    truth, steps = deciding(truths), _compare_steps(run, truths)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "sealed",
        "jobid": jobid,
        "run_id": run.get("run_id") if run else None,
        "verdict": _judge(run, truths, known, doubts).as_dict(),
        "slurm": truth.to_dict(),
        "components": [each.to_dict() for each in truths] if len(truths) > 1 else [],
        "steps": [step.raw for each in truths for step in each.steps],
        "steps_compared": {"by_id": len(_steps_seen(run)[0]), "by_count": len(_steps_seen(run)[1])},
        "disagreements": [*steps.contradictions, *steps.unconfirmed, *_renamings(truths, known)],
        "known": asdict(known),
        "doubts": list(doubts),
        "run": run,
        "run_sha256": run_sha256,
        "versions": dict(versions),
    }


def _judge(run: Document | None, truths: Sequence[Truth], known: Known, doubts: Sequence[str]) -> Verdict:
    """The verdict over a run and the truths about its job."""
    steps = _compare_steps(run, truths)
    if run and is_adopted(run):
        verdict = judge_adopted(evidence_from(run), deciding(truths), steps)
    else:
        verdict = judge_sealed(evidence_from(run) if run else None, deciding(truths), steps.contradictions)
    early = [stranger.why for truth in truths if (stranger := stranger_of(truth, known)) and stranger.earlier]
    reasons = [*doubts, *(f"Slurm's record is of another job with this id: {why}" for why in early)]
    return unproven(verdict, reasons[0]) if reasons else verdict


def stranger_of(truth: Truth, known: Known) -> Stranger | None:
    """Why the record is of another job with the same id than the one that we know; None: it may well be of ours."""
    if truth.record is None:
        return None
    records = [answer.record for answer in truth.answers if answer.record]
    told = not_of_this_job(truth.record, by_slurms_clock(known, records), requeued=bool(restarts_of(truth)))
    return told or runs_another_script(known, records)


def contradicted(sealed: Document, truth: Truth) -> str | None:
    """Why a sealed receipt cannot be of the job that Slurm's answers tell of: it ended otherwise than was sealed, or
    the controller says that it is not over. None: nothing denies it; an accounting that is late or stale does not."""
    record, said = truth.record, sealed.get("slurm")
    if is_adopted(sealed.get("run")):
        return None  # however the job went on
    if record is None or truth.standing == "several" or not isinstance(said, dict):
        return None
    told = f"it was sealed with {said.get('state')} {said.get('exit_code') or ''}".rstrip()
    denied = f"{told}, and Slurm's record says {record.state_text} {record.exit} ({record.source})"
    if not record.terminal:
        goes_on = record.source == "scontrol" and record.state.phase not in ("unknown", "ending")
        return denied if goes_on else None
    if record.state.word != parse_state(str(said.get("state"))).word:
        return denied
    try:
        code = parse_exit_code(str(said["exit_code"])) if said.get("exit_code") else None
    except ValueError:
        return f"{told}, which is no exit code"
    return None if code is None or _same_code(code, truth.native or record.exit) else denied


def _same_code(one: ExitCode, other: ExitCode) -> bool:
    """Whether two records of a code can mean the same: accounting folds codes of 128 and more."""
    return one == other or one.shell % FOLD == other.shell % FOLD


def _renamings(truths: Sequence[Truth], known: Known) -> list[str]:
    records = [answer.record for truth in truths for answer in truth.answers if answer.record is not None]
    return list(dict.fromkeys(text for record in records if (text := renamed(record, known))))


def _compare_steps(run: Document | None, truths: Sequence[Truth]) -> StepComparison:
    """Our own steps: what accounting says against what the engine saw."""
    return compare_steps([step for truth in truths for step in truth.steps], *_steps_seen(run))


def _steps_seen(run: Document | None) -> tuple[dict[str, int], list[int]]:
    """The codes that the engine saw: by the steps' ids, and of ranks without an agent, whose steps nobody knows."""
    ends = [(rank.get("step"), rank.get("returncode")) for rank in (run or {}).get("ranks", ())]
    told = [(step, code) for step, code in ends if isinstance(code, int) and code >= 0]
    return {str(step): code for step, code in told if step is not None}, [code for step, code in told if step is None]


def is_adopted(run: object) -> bool:
    """Whether a run receipt (or a journal's opening) is of a run in somebody else's job."""
    return isinstance(run, dict) and run.get("adopted") is True


def evidence_from(run: Document) -> Evidence:
    """The evidence in a run receipt. Raises NotAReceipt."""
    known = {item.name for item in fields(Failure)}
    try:
        failures = tuple(Failure(**{k: v for k, v in item.items() if k in known}) for item in run["failures"])
        return Evidence(
            completed=run["completed"] is True,
            failures=failures,
            doubts=tuple(run["doubts"]),
            not_collected=tuple(run["not_collected"]),
            engine_lost=run["engine_lost"] is not False,
            last_word=_last_word(run.get("ended"), run.get("timeline") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise NotAReceipt(f"the run's evidence cannot be read: {_lacking(error)}") from error


def replay(document: Document) -> tuple[Verdict, bool]:
    """The verdict derived again, and whether it is the saved one. Raises NotAReceipt."""
    if not isinstance(document, dict):
        raise NotAReceipt("no JSON object")
    try:
        kind, saved = document["kind"], document["verdict"]
        if kind == "run":
            verdict = judge_run(evidence_from(document), final=document["launcher"] != "slurm")
        elif kind == "sealed":
            known = Known.from_dict(document.get("known") or {})
            verdict = _judge(document["run"], _truths(document), known, list(document.get("doubts") or ()))
        else:
            raise NotAReceipt(f"a receipt is of kind run or sealed, found {kind!r}")
        same = (verdict.outcome, verdict.code, verdict.origin, verdict.reason)
        return verdict, same == (saved["outcome"], saved["code"], saved["origin"], saved["reason"])
    except NotAReceipt:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NotAReceipt(_lacking(error)) from error


def _lacking(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else f"something in it is of another kind: {error}"


def _truths(document: Document) -> list[Truth]:
    """The truths derived again from Slurm's answers. Raises KeyError, TypeError, ValueError, NotAReceipt."""
    jobid, components = str(document["jobid"]), document.get("components") or []
    names = [f"{jobid}+{number}" for number in range(len(components))]
    if [component["jobid"] for component in components] != names:
        raise NotAReceipt(f"the components of job {jobid} must be {', '.join(names)}")
    saved = components or [document["slurm"]]
    return [
        decide(name, [Answer.from_dict(answer) for answer in item["answers"]])
        for name, item in zip(names or [jobid], saved, strict=True)
    ]


CONCLUSIONS: Final = ("standing", "state", "source", "exit_code", "raw", "code")
"""What a sealed receipt says of Slurm that follows from Slurm's own words."""


DERIVED: Final = ("run_id", "steps", "steps_compared", "known", "doubts")
"""What else in a sealed receipt is as the evidence in it gives it."""


def changed_conclusions(document: Document) -> list[str]:
    """What a receipt says that does not follow from the evidence in it. Raises NotAReceipt."""
    try:
        if document["kind"] == "run":
            return _nameless("the run", document, "run_id", "jobid")
        run = document["run"]
        nameless = _nameless("the receipt", document, "jobid")
        nameless += [] if run is None else _nameless("the run", run, "run_id", "jobid")
        return nameless or [*_changed_facts(document, run), *_changed_truths(document)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NotAReceipt(_lacking(error)) from error


def _nameless(where: str, part: Document, *keys: str) -> list[str]:
    return [f"{where} has no {key}" for key in keys if not (isinstance(part.get(key), str) and part[key])]


def _changed_facts(document: Document, run: Document | None) -> Iterator[str]:
    """Beyond Slurm's words. The disagreements may be more than those that follow."""
    jobid, digest = document["jobid"], document.get("run_sha256")
    if run is not None and run["jobid"] != jobid:
        yield f"the run is of job {run['jobid']}, the receipt of job {jobid}"
    if (run is None or run["engine_lost"] is True) is not (digest is None):
        yield "run_sha256 does not fit: what an engine wrote has one, and nothing else has"
    known, doubts = Known.from_dict(document.get("known") or {}), list(document.get("doubts") or ())
    derived = sealed_receipt(run, digest, jobid, _truths(document), versions={}, known=known, doubts=doubts)
    yield from (f"{key} is not what follows from the evidence" for key in DERIVED if document.get(key) != derived[key])
    told = document.get("disagreements")
    if not isinstance(told, list) or any(text not in told for text in derived["disagreements"]):
        yield "disagreements lacks one that follows from the evidence"


def _changed_truths(document: Document) -> Iterator[str]:
    """What is said of Slurm and does not follow from its own words."""
    truths = _truths(document)
    pairs = [(deciding(truths), document["slurm"], "the receipt")]
    pairs += [(truth, item, truth.jobid) for truth, item in zip(truths, document.get("components") or (), strict=False)]
    for truth, saved, where in pairs:
        derived = truth.to_dict()
        for key in CONCLUSIONS:
            if derived[key] != saved.get(key):
                yield f"Slurm's answers say {key} {derived[key]!r}, {where} says {saved.get(key)!r}"
