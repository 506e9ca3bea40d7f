"""Reading the record of a submission. Light: quick verbs use it."""

from __future__ import annotations

import json
import os

from supervisor.core.submission import RECORD, Submission


def read_record(directory: str) -> Submission:
    """The record of a submission. Raises OSError, and ValueError for a file that is no such record."""
    with open(os.path.join(directory, RECORD), encoding="utf-8") as file:
        return Submission.from_dict(json.load(file))
