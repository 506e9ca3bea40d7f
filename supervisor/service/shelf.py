"""The books where they stand, for verbs that find no daemon: read as far as they go, and never written.

A daemon may write them meanwhile: a line that is not whole yet is not there yet. What is told is true as of the last
line (`changed`); what has happened since, nobody has written down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from supervisor.core.keeping import IllegalEvent, step
from supervisor.core.kept import Kept
from supervisor.service.found import BOOKS, Found, read_book
from supervisor.service.interface import Allocation, Document
from supervisor.service.place import OPEN_DIRECTORY, state_directory


def on_shelf(environ: Mapping[str, str], key: str) -> Allocation | None:
    """The allocation with this key, by its book in this host's state directory; None when there is none."""
    try:
        books = _books(environ)
    except OSError:
        return None
    try:
        book = _read(books, key)
    finally:
        os.close(books)
    return _told(book) if book else None


def all_on_shelf(environ: Mapping[str, str]) -> list[Allocation]:
    """Those of all books, in the order in which they were begun. Raises nothing: where nothing can be read, there is
    nothing."""
    try:
        books = _books(environ)
    except OSError:
        return []
    try:
        found = [book for key in os.listdir(books) if (book := _read(books, key))]
    finally:
        os.close(books)
    found.sort(key=lambda book: book.lines[0].seq if book.lines else 0)
    return list(map(_told, found))


def _books(environ: Mapping[str, str]) -> int:
    return os.open(os.path.join(state_directory(environ), BOOKS), OPEN_DIRECTORY)


def _read(books: int, key: str) -> Found | None:
    try:
        directory = os.open(key, OPEN_DIRECTORY, dir_fd=books)
    except OSError:
        return None
    try:
        book = read_book(key, directory, mend=False)
    finally:
        os.close(directory)
    return book if book.lines or book.damage else None


def _told(book: Found) -> Allocation:
    state = Kept()
    with suppress(IllegalEvent):  # what comes behind is not known here, either
        for line in book.lines:
            state, _ = step(state, line.event)
    created, changed = (book.lines[0].utc, book.lines[-1].utc) if book.lines else ("", "")
    damage = book.advice(book.damage) if book.damage else ""
    return allocation_of(book.key, state, created, changed, damage=damage)


def allocation_of(
    key: str,
    state: Kept,
    created: str,
    changed: str,
    *,
    position: int | None = None,
    damage: str = "",
    ranks: Sequence[Document] = (),
) -> Allocation:
    """An allocation as the interface has it. `position`: in the queue; `damage`: why its book cannot be read."""
    return Allocation(
        key=key,
        kind=state.kind or "submitted",  # type: ignore[arg-type]
        state="damaged" if damage else "queued" if state.phase == "new" else state.phase,  # type: ignore[arg-type]
        name=state.name,
        created=created,
        changed=changed,
        jobid=state.jobid or None,
        cluster=state.cluster or None,
        run_id=state.run_id or None,
        run_dir=state.run_dir or None,
        slurm=state.slurm or None,
        reason=state.reason or None,
        position=position,
        stopping=state.stopping or None,
        verdict=dict(state.verdict) if state.verdict and state.phase == "ended" else None,
        first_failure=state.first_failure or None,
        receipt=state.receipt or None,
        trouble=damage or state.trouble or None,
        ranks=ranks,
        run_dirs=tuple(state.last_runs.values()),
    )
