"""`allocctl verify --replay RECEIPT`: the verdict derived again from nothing but what is saved."""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

from supervisor.cli.output import refuse, sentence, tell
from supervisor.core import codes


def replay_receipt(path: str, as_json: bool) -> int:
    """Derive the verdict again from saved evidence. Its code, or 75 when it is not the saved one, or what else the
    receipt says does not follow from its evidence; 78 for what is no receipt."""
    from supervisor.core.receipt import replay

    args = argparse.Namespace(json=as_json)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        verdict, same = replay(document)
        problems = ([] if same else ["the saved verdict is another"]) + _changed(document)
    except OSError as error:
        return refuse(args, sentence(error), codes.CONFIG)
    except ValueError as error:
        return refuse(args, f"{path} is not a receipt: {error}", codes.CONFIG)
    except RecursionError:
        return refuse(args, f"{path} is not a receipt: it is nested too deeply", codes.CONFIG)
    if as_json:
        answer = {"schema_version": 1, "agrees": not problems, "problems": problems, "verdict": verdict.as_dict()}
        tell(json.dumps(answer, ensure_ascii=False, indent=1))
    else:
        tell(f"{verdict.outcome} {verdict.code} ({verdict.origin}): {verdict.summary}")
        tell(f"  derived again from the saved evidence, which {'DISAGREES' if problems else 'agrees'}")
        for text in problems:
            tell(f"  {text}")
    return codes.UNVERIFIABLE if problems else verdict.code


def _changed(document: dict[str, Any]) -> list[str]:
    """What in a sealed receipt is not as it was sealed, beyond the verdict: the run inside it is byte for byte the run
    receipt of that sha256, and what is said follows from the evidence."""
    from supervisor.core.receipt import changed_conclusions
    from supervisor.engine.receipts import render

    digest = document.get("run_sha256")
    moved = digest is not None and hashlib.sha256(render(document["run"])).hexdigest() != digest
    problems = ["the run is not the one that was sealed: its sha256 is another"] if moved else []
    return problems + changed_conclusions(document)
