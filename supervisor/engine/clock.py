"""Moments as the journal, the marker and the receipts write them."""

from __future__ import annotations

import datetime


def utc(epoch: float, timespec: str = "milliseconds") -> str:
    """Seconds since the epoch as UTC in ISO 8601, with a `Z`."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
