"""Reading the record of a submission. Light: quick verbs use it."""

from __future__ import annotations

import json
import os
from typing import Final

from supervisor.core.submission import RECORD, Submission
from supervisor.loop.files import read_whole

RECORD_SIZE: Final = 1 << 26  # bytes: more is no record of ours


def read_record(directory: str) -> Submission:
    """The record of a submission. Raises OSError, and ValueError for a file that is no such record."""
    data = read_whole(os.path.join(directory, RECORD), RECORD_SIZE)
    try:
        return Submission.from_dict(json.loads(data))
    except RecursionError:
        raise ValueError("no record of a submission: it is nested too deeply") from None
