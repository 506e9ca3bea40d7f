"""Is what was judged still there? The files of a complete contract at the end of the run, against those that made it
complete.

A contract is complete the moment its files are right, and ranks may go on for a while after that: they can replace
those files, or delete them. What a run leaves is what counts. So the files are looked at again when they are collected,
and `Collected` tells of each that is not, by size and time of its last change, what was judged: what is there now, and
its checksum if it could be made. The same bytes, written once more, are the same file.

What nobody could look at is neither: it leaves a doubt.
"""

from __future__ import annotations

from typing import Any, Final

from supervisor.core import events as ev
from supervisor.core.artifacts import ASIDE, ArtifactState, FileFact, few

A_FILE: Final = "a file"
NOTHING: Final = "nothing"
UNKNOWN: Final = ""
"""What is found in a file's place: a plain file, nothing, or what else there is, in words; unknown when nobody could
look."""


def changes(contract: ArtifactState, collected: ev.Collected) -> tuple[str, str]:
    """What became of a contract's files, in two sentences: those that are not what was judged, and those of which
    nobody knows; "" where there are none."""
    files = contract.finding.files if contract.finding else ()
    judged = {fact.path: fact for fact in files if fact.kind != ASIDE}
    changed, unknown = [], []
    if judged and contract.contract not in collected.compared:
        unknown.append("its files did not answer while they were collected")
    for item in collected.differing:
        fact = judged.get(item["path"])
        if item["contract"] != contract.contract or fact is None:
            continue
        text = f"{fact.path}: found {_found(item)}; expected {_said(fact.size, fact.sha256)}"
        if item["found"] not in (UNKNOWN, A_FILE) or (item["found"] == A_FILE and _is_other(item, fact)):
            changed.append(text)
        elif item["found"] == UNKNOWN or item["sha256"] is None or fact.sha256 is None:
            unknown.append(text)
    return "; ".join(few(changed)), "; ".join(few(unknown))


def _is_other(item: dict[str, Any], fact: FileFact) -> bool:
    both = item["sha256"] is not None and fact.sha256 is not None
    return bool(item["size"] != fact.size or (both and item["sha256"] != fact.sha256))


def _found(item: dict[str, Any]) -> str:
    if item["found"] == UNKNOWN:
        return f"no answer ({item['problem']})"
    if item["found"] != A_FILE:
        return f"{item['found']}"
    why = f" ({item['problem']})" if item["problem"] else ""
    return f"{_said(item['size'], item['sha256'])}, written since{why}"


def _said(size: int, sha256: str | None) -> str:
    return f"{size} bytes with sha256 {sha256}" if sha256 else f"{size} bytes of unknown sha256"
