"""allocctl: one module a verb, and only the verb that was typed is imported, so that quick verbs stay quick.

A verb's module has `add(subparsers)` (its arguments) and `run(args) -> int` (its exit code). A user's mistake is a
sentence on stderr and an exit code from `core/codes.py`, never a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from supervisor.core import codes

VERBS: Final[dict[str, str]] = {
    "run": "run a plan to a proven verdict, in this allocation or on this machine",
    "check": "check a plan, and list every error in it",
    "verify": "say how a job really ended, by Slurm's records, and seal its receipt",
    "status": "what a run is doing, or how it ended",
    "explain": "how a run's verdict came about, in sentences",
    "logs": "print or follow a run's logs",
    "receipt": "print a run's receipt",
    "marker": "publish, note, read or wait for a coordinator's exit code",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not sys.platform.startswith("linux"):
        print("allocctl: Linux only: process trees are found in /proc, and steps are Slurm's", file=sys.stderr)
        return codes.CONFIG
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb not in VERBS:
        return _help(words)
    module = import_module(f"supervisor.cli.{verb}")
    parser = _parser()
    module.add(parser.add_subparsers(dest="verb", required=True, prog="allocctl"))
    args = parser.parse_args(words)
    try:
        return int(module.run(args))
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left: nobody is there to be told
        return codes.FAILED
    except KeyboardInterrupt:
        return codes.CANCELLED


def _parser() -> _Parser:
    return _Parser(prog="allocctl", description=__doc__.splitlines()[0] if __doc__ else None)


class _Parser(argparse.ArgumentParser):
    """Wrong words on the command line are a configuration error (78), like a wrong plan."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; so does exit()
        self.print_usage(sys.stderr)
        self.exit(codes.CONFIG, f"{self.prog}: {message}\n")


def _help(words: list[str]) -> int:
    from supervisor import __version__

    if "--version" in words:
        print(f"allocctl {__version__}")
        return codes.OK
    lines = "\n".join(f"  {verb:<9} {text}" for verb, text in VERBS.items())
    usage = f"usage: allocctl VERB [arguments]\n\n{lines}\n\n`allocctl VERB --help` tells a verb's arguments.\n"
    if not words or {"-h", "--help"} & set(words):
        print(usage, end="", file=sys.stdout if words else sys.stderr)
        return codes.OK if words else codes.CONFIG
    print(f"allocctl: no verb {words[0]!r}\n{usage}", end="", file=sys.stderr)
    return codes.CONFIG


if __name__ == "__main__":
    sys.exit(main())
