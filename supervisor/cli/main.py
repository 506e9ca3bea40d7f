"""allocctl: one module a verb, and only the verb that was typed is imported, so that quick verbs stay quick.

A verb's module has `add(subparsers)` (its arguments) and `run(args) -> int` (its exit code). A user's mistake is a
sentence on stderr and an exit code from `core/codes.py`, never a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Final, NoReturn

from supervisor.cli.output import ENDING, complain, end_with, flush_stdout, sentence, tell
from supervisor.cli.runner import quoting
from supervisor.core import codes

VERBS: Final[dict[str, str]] = {
    "run": "run a plan to a proven verdict, in this allocation or on this machine",
    "adopt": "run a plan in a job that runs already, from here",
    "submit": "submit a plan to Slurm, exactly once",
    "list": "the allocations that allocd holds, or the runs that are known here",
    "watch": "see them change, as they do",
    "stop": "end a run in order, or cancel a job that was submitted here",
    "wait": "follow a job to its proven end, and exit with its code",
    "check": "check a plan, and list every error in it",
    "verify": "say how a job really ended, by Slurm's records, and seal its receipt",
    "status": "what a run is doing, or how it ended",
    "explain": "how a run's verdict came about, in sentences",
    "artifacts": "judge a directory's artifacts, or tell what a run's have come to",
    "collect": "collect a run's files once more",
    "logs": "print or follow a run's logs",
    "receipt": "print a run's receipt",
    "service": "allocd as a service of systemd's user manager",
    "marker": "publish, note, read or wait for a coordinator's exit code",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns its exit code."""
    _complete_streams()
    with quoting(os.environ), _signals_kept(for_good=argv is None):
        return _main(list(sys.argv[1:] if argv is None else argv))


@contextmanager
def _signals_kept(*, for_good: bool) -> Iterator[None]:
    """Leave the signals as they were to a program that calls us; as a process, ignore them until Python has ended."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        with suppress(ValueError):  # see `end_with`
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if for_good else handler)


def _main(words: list[str]) -> int:
    if not sys.platform.startswith("linux"):
        complain("Linux only: process trees are found in /proc, and steps are Slurm's")
        return codes.CONFIG
    try:
        code = _verb(words)
    except KeyboardInterrupt:
        code = codes.CANCELLED
    except BrokenPipeError:
        code = codes.FAILED  # the reader has left, and need not be told
    except OSError as error:
        complain(sentence(error))
        code = codes.FAILED
    except Exception as error:  # noqa: BLE001 - nobody's mistake but ours: told as such, with what a maintainer needs
        traceback.print_exc()
        complain(f"a fault of allocd itself: {type(error).__name__}: {error}")
        code = codes.FAULT
    end_with(code)
    return flush_stdout(code)


def _verb(words: list[str]) -> int:
    if not words or words[0] not in VERBS:
        return _help(words)
    module = import_module(f"supervisor.cli.{words[0]}")
    verbs = _Parser().add_subparsers(prog="allocctl")
    module.add(verbs)
    try:
        parser = verbs.choices[words[0]]
        parse = getattr(module, "parse", type(parser).parse_args)
        args = parse(parser, words[1:])
    except SystemExit as end:  # after --help, or a wrong word
        return int(end.code or codes.OK)
    for word, what in (("socket", "--socket"), ("run", "RUN"), ("job", "JOB")):
        if getattr(args, word, None) == "":  # "$(cat RUN/ctl.path)" of a run that has ended is not "not given"
            complain(f"{what} is empty: nobody and nothing has that name (leave it out for the default)")
            return codes.UNREACHABLE
    return int(module.run(args))


class _Parser(argparse.ArgumentParser):
    """Wrong words on the command line are a configuration error (78), like a wrong plan. Options are written out: an
    abbreviation in a script would change its meaning with the next option."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def print_help(self, file: object = None) -> None:
        """To stdout. (argparse of 3.11.7 takes no notice where that cannot be written.)"""
        tell(self.format_help().rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(codes.CONFIG, f"{self.prog}: {message}\n")


def _help(words: list[str]) -> int:
    from supervisor import __version__

    if words[:1] == ["--version"]:
        print(f"allocctl {__version__}")
        return codes.OK
    verbs = "\n".join(f"  {verb:<9} {text}" for verb, text in VERBS.items())
    usage = f"usage: allocctl VERB [arguments]\n\n{verbs}\n\n`allocctl VERB --help` tells a verb's arguments."
    if words[:1] in (["-h"], ["--help"]):
        print(usage)
        return codes.OK
    if words:
        import difflib

        near = difflib.get_close_matches(words[0], VERBS, 1)
        complain(f"no verb {words[0]!r}" + (f": did you mean {near[0]}?" if near else ""))
    print(usage, file=sys.stderr)
    return codes.CONFIG


def _complete_streams() -> None:
    """Three standard streams, whatever we were started with: a number that is free would be given to the next file that
    is opened, and what is meant for people would be written there. What cannot be encoded is shown escaped."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as we live
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
