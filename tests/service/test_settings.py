"""The daemon's settings: which one wins, and everything that is wrong at once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from supervisor.service.settings import Settings, SettingsErrors, add_flags, config_path, read_settings


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "allocd").mkdir()
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def write(environ: dict[str, str], text: str) -> None:
    Path(config_path(environ)).write_text(text)


def test_flags_over_environment_over_file_over_default(environ: dict[str, str]) -> None:
    assert read_settings(environ) == Settings()
    write(environ, 'limit = 1\npatience = 5\noutage = 7\ncollect = "/x"\n')
    environ |= {"ALLOCD_LIMIT": "2", "ALLOCD_PATIENCE": "6.5"}
    found = read_settings(environ, {"limit": "3", "outage": None})
    assert found == Settings(limit=3, patience=6.5, outage=7.0, collect="/x")


def test_all_errors_are_told(environ: dict[str, str]) -> None:
    write(environ, 'limit = true\nlimt = 3\nlog_level = "loud"\n')
    environ["ALLOCD_OUTAGE"] = "nan"
    with pytest.raises(SettingsErrors) as wrong:
        read_settings(environ, {"collect": "relative", "keep": "0"})
    lines = str(wrong.value).splitlines()
    path = config_path(environ)
    assert lines == [
        f"{path}: limit: found True; expected an integer, 1..100000",
        f"{path}: limt: no such setting: did you mean limit?",
        f"{path}: log_level: found 'loud'; expected one of debug, info, warning, error",
        "--collect: found 'relative'; expected an absolute path",
        "environment: ALLOCD_OUTAGE: found nan; expected a number, 0..2592000",
        "--keep: found 0; expected an integer, 1..1000000",
    ]


@pytest.mark.parametrize("text", [b"limit =", b"\xff"])
def test_a_file_that_is_no_toml(environ: dict[str, str], text: bytes) -> None:
    Path(config_path(environ)).write_bytes(text)
    with pytest.raises(SettingsErrors, match=r"allocd\.toml: "):
        read_settings(environ)


def test_a_file_that_was_named_must_be_there(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsErrors, match="no such file"):
        read_settings(environ, path="/nowhere/allocd.toml")


def test_each_setting_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    names = {item.name for item in fields(Settings)}
    assert set(vars(parser.parse_args([]))) == names
    assert parser.parse_args(["--log-level", "debug"]).log_level == "debug"
