"""One listing of a place serves many followers, each with its own job's names, and is never older than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.runs.listing import Listings


def test_each_job_gets_its_own_names_of_one_listing(tmp_path: Path) -> None:
    now = [0.0]
    listings = Listings(age=1.0, clock=lambda: now[0])
    for name in ("7", "7.r1.s2", "7@abcd0123", "7_3", "77", "local-7", "submit-7", "7.old"):
        (tmp_path / name).mkdir()
    place = str(tmp_path)
    assert sorted(listings.names(place, "7")) == ["7", "7.r1.s2", "7@abcd0123", "7_3"]
    assert sorted(listings.names(place, "7_3")) == sorted(listings.names(place, "7"))
    assert listings.names(place, "77") == ["77"]
    assert listings.names(place, "8") == ()
    (tmp_path / "8").mkdir()
    now[0] = 1.0
    assert listings.names(place, "8") == ()  # as it was
    assert listings.names(place, "8", fresh=True) == ["8"]
    (tmp_path / "8.s1").mkdir()
    now[0] = 2.1
    assert sorted(listings.names(place, "8")) == ["8", "8.s1"]


def test_a_place_that_is_not_there_is_looked_for_again(tmp_path: Path) -> None:
    listings = Listings()
    with pytest.raises(FileNotFoundError):
        listings.names(str(tmp_path / "later"), "7")
    (tmp_path / "later" / "7").mkdir(parents=True)
    assert listings.names(str(tmp_path / "later"), "7") == ["7"]
