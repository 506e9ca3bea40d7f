"""Runs that ended as a JUnit XML report, for whatever reads those: a test suite for each run; in it a test case for the
verdict, for each rank and for each artifact contract.

    passed     the verdict is a success; a rank ended as it should; a contract is complete
    failure    the verdict is a failure; a rank failed; a contract is invalid or late
    error      the verdict is unverifiable; nobody saw how a rank ended
    skipped    what an earlier failure caused: a rank that was stopped because of it, a contract that was still open

Times are seconds: the run's own, and for a rank the time from the run's beginning to the rank's end.

XML has no way to write most control characters, not even escaped: words are made printable first, and the rest (`&`,
`<`, `]]>`) is the library's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from supervisor.cli.ci import Document, log_tails, name_of, run_of
from supervisor.cli.status import how
from supervisor.core.text import printable


@dataclass(frozen=True)
class Case:
    """A test case. `result` is "" (passed), failure, error or skipped; `kind` says which sort of it; `lines` are its
    text; `seconds` is None where nobody measured."""

    name: str
    result: str = ""
    message: str = ""
    kind: str = ""
    lines: tuple[str, ...] = ()
    seconds: float | None = None


def junit(documents: list[Document]) -> bytes:
    """The report on the runs of these receipts (sealed, or the run's own), as UTF-8. Raises KeyError, TypeError,
    AttributeError, ValueError or IndexError for a document that is no receipt."""
    root = ElementTree.Element("testsuites", name="allocd")
    suites = [_suite(root, document) for document in documents]
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _suite(root: ElementTree.Element, document: Document) -> ElementTree.Element:
    cases, run, verdict = list(_cases(document)), run_of(document), document["verdict"]
    suite = ElementTree.SubElement(root, "testsuite", name=printable(name_of(document)))
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.set("tests", str(len(cases)))
    for key, result in counts.items():
        suite.set(key, str(sum(case.result == result for case in cases)))
    if run:
        for key, value in (("time", run["seconds"]), ("timestamp", run["started"]), ("hostname", run["host"])):
            if value is not None:
                suite.set(key, printable(str(value)))
    told = {"jobid": document["jobid"], "run_dir": run["run_dir"] if run else None}
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in {**told, "exit_code": verdict["code"], "origin": verdict["origin"]}.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=key, value=printable(str(value)))
    classname = printable(str(run["name"])) if run else "job"
    for case in cases:
        _write(suite, classname, case)
    return suite


def _write(suite: ElementTree.Element, classname: str, case: Case) -> None:
    element = ElementTree.SubElement(suite, "testcase", classname=classname, name=printable(case.name))
    if case.seconds is not None:
        element.set("time", f"{case.seconds:.3f}")
    if case.result:
        result = ElementTree.SubElement(element, case.result, message=printable(case.message))
        if case.kind:
            result.set("type", printable(case.kind))
        result.text = "\n".join(map(printable, case.lines))


# --- what becomes of what ----------------------------------------------------------------------------------------


def _cases(document: Document) -> Iterator[Case]:
    yield _verdict(document)
    if run := run_of(document):
        yield from (_rank(run, rank) for rank in run["ranks"])
        yield from (_artifact(item) for item in run["artifacts"])


def _verdict(document: Document) -> Case:
    run, verdict = run_of(document), document["verdict"]
    result = {"success": "", "failure": "failure"}.get(verdict["outcome"], "error")
    lines = (f"exit code {verdict['code']} ({verdict['origin']})", *map(str, verdict["because"]))
    seconds = run["seconds"] if run else None
    return Case("verdict", result, str(verdict["summary"]), str(verdict["reason"]), lines, seconds)


def _rank(run: Document, rank: Document) -> Case:
    number = rank["rank"]
    name = f"rank {number} ({rank['role']}) on {rank['node']}"
    failures = [item for item in run["failures"] if item["rank"] == number]
    fell = next((item for item in run["consequences"] if item["rank"] == number), None)
    seconds = _ended_after(run, rank)
    if failures:
        first, texts = failures[0], [str(item["text"]) for item in failures]
        tails = [line for path, tail in log_tails(run, number) for line in (f"The end of {path}:", *tail)]
        return Case(name, "failure", texts[0], str(first["what"]), (*texts, *tails), seconds)
    if fell:
        return Case(name, "skipped", f"{fell['text']} ({fell['reason']})", seconds=seconds)
    if rank["end"] is None:
        return Case(name, "error", how(rank, run["engine_lost"]), "unseen", seconds=seconds)
    return Case(name, seconds=seconds)


def _ended_after(run: Document, rank: Document) -> float | None:
    """Seconds from the run's beginning to the rank's end; None when its end was not seen."""
    seq = rank["end"]["seq"] if rank["end"] else None
    return next((float(line["after"]) for line in run["timeline"] if line["seq"] == seq), None)


def _artifact(item: Document) -> Case:
    name = f"artifact {item['contract']}"
    if item["state"] == "complete":
        return Case(name)
    reason = f"{item['state']}{': ' + item['reason'] if item['reason'] else ''}"
    lines = tuple(map(str, (item["finding"] or {}).get("problems") or ()))
    if item["state"] in ("invalid", "late"):
        return Case(name, "failure", "; ".join((reason, *lines)), str(item["state"]), lines)
    return Case(name, "skipped", f"{reason} when the run ended", lines=lines)
