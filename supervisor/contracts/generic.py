"""The generic contract: files that match a pattern, are whole, and hold what the plan's rules ask for.

The files come from a job, and so do their names: both are data, and hostile until looked at.

* Directories are *listed*, one component after the other, each opened relative to its parent's descriptor. A
  name that was looked for and missing stays missing on a network file system for up to a minute; a listing of a
  freshly opened directory does not. And what is reached this way cannot leave the root, whatever is renamed or
  replaced in between.
* Symbolic links are refused wherever the job could have made them: in the last component, in those before it,
  and in the part of the root that lies inside the run directory. (A root elsewhere is the plan's word; the links
  on the way to it are the site's.)
* A FIFO, socket or device is never waited for (O_NONBLOCK) and never counts. Neither does a file of a strange
  owner or with a second name, which may be somebody else's.

The answer is *pending* while something is missing, refused, unreadable, empty or half-written: all of these may
still change. It is *invalid* when a file that was read whole, and is JSON, breaks a rule: it says something
wrong, and waiting does not help. Strictness about JSON (no NaN, no key twice) is judged only when the parse has
come to its end, so that a prefix of a right file is never invalid.

An error that is nobody's but ours (no descriptors, no memory, a value that is missing) is raised.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from supervisor.core.artifact_table import Artifact, FieldRule
from supervisor.core.artifacts import Answer, FileFact, Finding, Instance
from supervisor.core.substitution import show, substitute

SIZE_CAP: Final = 1 << 30
"""Bytes. No file above this is read: not accepted as JSON, and left without a sha256 otherwise."""
NAMES_CAP: Final = 200_000
"""Directory entries that one look may list; a pattern that needs more is a problem of the plan."""
DEPTH_CAP: Final = 64
"""Directories below the root that `**` goes down."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EINVAL})
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class _Absent:
    """The type of ABSENT: no such field (null is one)."""


ABSENT: Final = _Absent()


# -------------------------------------------------------------------------------------------- walking below a root


class Match(NamedTuple):
    """A directory entry that matches the pattern; `directory` is open as long as the walk stands at it."""

    path: str  # relative to the root
    directory: int  # descriptor
    name: str
    status: os.stat_result  # of the entry itself, links not followed


@dataclass(slots=True)
class _Walk:
    """One look: what stood in its way, and how many names it has listed."""

    problems: list[str] = field(default_factory=list)
    names: int = 0

    def trouble(self, where: str, error: OSError) -> None:
        """A place that cannot be looked at: pending, unless the trouble is ours."""
        if error.errno in _OURS:
            raise error
        if error.errno != errno.ENOENT:  # gone since it was listed
            self.problems.append(f"{where or '.'}: {error.strerror}")

    def listing(self, directory: int, where: str) -> list[str]:
        try:
            names = os.listdir(directory)
        except OSError as error:
            self.trouble(where, error)
            return []
        self.names += len(names)
        if self.names > NAMES_CAP:
            self.problems.append(f"{where or '.'}: found too many names; expected at most {NAMES_CAP} in one look")
            return []
        return sorted(names)

    def outputs(self, directory: int, parts: tuple[str, ...]) -> Iterator[Match]:
        """The entries that match, each once, without directories that only happen to fit a wildcard."""
        seen: set[str] = set()
        for match in self.matches(directory, parts):
            chance = _is_pattern(parts[-1]) and stat.S_ISDIR(match.status.st_mode)
            if not chance and match.path not in seen:
                seen.add(match.path)
                yield match

    def matches(self, directory: int, parts: tuple[str, ...], where: str = "", depth: int = 0) -> Iterator[Match]:
        """The entries below `directory` that match `parts`, one pattern a component."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self.matches(directory, rest, where, depth)
        wanted = re.compile(fnmatch.translate("*" if part == "**" else part))
        for name in self.listing(directory, where):
            if not wanted.match(name) or (name[0] == "." and part[0] != "."):
                continue
            path = f"{where}/{name}" if where else name
            if not name.isprintable():
                self.problems.append(f"{path!a}: found control characters; expected a plain file name")
                continue
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                self.trouble(path, error)
                continue
            if not rest:
                yield Match(path, directory, name, status)
            else:
                yield from self._inside(Match(path, directory, name, status), part, parts, depth)

    def _inside(self, entry: Match, part: str, parts: tuple[str, ...], depth: int) -> Iterator[Match]:
        """The matches below an entry that stands where the pattern wants a directory."""
        if stat.S_ISLNK(entry.status.st_mode):
            self.problems.append(f"{entry.path}: found a symbolic link; expected a directory")
        elif not stat.S_ISDIR(entry.status.st_mode):
            if not _is_pattern(part):
                self.problems.append(f"{entry.path}: found {_kind(entry.status)}; expected a directory")
        elif depth >= DEPTH_CAP:
            self.problems.append(f"{entry.path}: found more directories; expected at most {DEPTH_CAP} levels")
        else:
            try:
                inside = os.open(entry.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=entry.directory)
            except OSError as error:
                self.trouble(entry.path, error)
                return
            try:
                yield from self.matches(inside, parts if part == "**" else parts[1:], entry.path, depth + 1)
            finally:
                os.close(inside)


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a file")


def _is_pattern(part: str) -> bool:
    return re.search(r"[*?\[]", part) is not None


def _parts(path: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """The pattern's components with the values put in. A value is literal: what it holds is no pattern.

    Raises ValueError for a value that would make another component of it.
    """
    literal = {word: re.sub(r"([*?\[])", r"[\1]", value) for word, value in values.items()}
    parts = tuple(substitute(part, literal) for part in path.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\0" in part:
            raise ValueError(f"{show(path)} becomes {show('/'.join(parts))}, which is no path below a root")
    return (*parts, "*") if parts[-1] == "**" else parts


def _plain(parts: tuple[str, ...]) -> str:
    """The pattern as a message shows it."""
    return re.sub(r"\[([*?\[])\]", r"\1", "/".join(parts))


@contextmanager
def _opened(root: Path, values: Mapping[str, str]) -> Iterator[int]:
    """A descriptor of the root. Inside the run directory each component is opened on its own, no link followed."""
    run_dir = Path(values["run_dir"])
    inside = root.is_relative_to(run_dir)
    directory = os.open(run_dir if inside else root, _DIRECTORY)
    try:
        for part in root.relative_to(run_dir).parts if inside else ():
            if part not in os.listdir(directory):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = below
        yield directory
    finally:
        os.close(directory)


def root_of(instance: Instance, values: Mapping[str, str]) -> Path:
    """The root of a contract; `values` are those of its rank, or of the run."""
    return Path(substitute(instance.artifact.root, values))


def preexisting(instance: Instance, root: Path, values: Mapping[str, str]) -> tuple[str, ...]:
    """What is there before the run where its outputs would be: files of any kind, links (dangling ones too), links
    and files in the place of a directory, as paths relative to the root; and, as `path: reason`, what keeps us from
    knowing. Empty when nothing is in the way.
    """
    walk, parts = _Walk(), _parts(instance.artifact.path, values)
    found: set[str] = set()
    try:
        with _opened(root, values) as directory:
            found.update(match.path for match in walk.outputs(directory, parts))
    except OSError as error:
        walk.trouble("", error)
    return (*sorted(found), *walk.problems)


# ------------------------------------------------------------------------------------------------ looking at files


class _Look(NamedTuple):
    """What one file said."""

    answer: Answer
    problems: tuple[str, ...]
    fact: FileFact


class _NotYet(Exception):
    """This file does not count now; the text says why."""


def check(instance: Instance, root: Path, values: Mapping[str, str]) -> Finding:
    """Look once at everything that the contract names. Reads the disk: call it in a thread.

    `root`: see `root_of`. `values`: the substitutions of the instance's rank, or of the run. Raises OSError,
    ValueError or KeyError for faults of ours only, which are no answer about the artifact.

    Files that are not JSON are read (for their sha256) only when nothing else is missing any more.
    """
    finding = _look_once(instance, root, values, digest=False)
    if finding.answer == "valid" and instance.artifact.format == "any":
        return _look_once(instance, root, values, digest=True)
    return finding


def _look_once(instance: Instance, root: Path, values: Mapping[str, str], digest: bool) -> Finding:
    artifact, walk, parts = instance.artifact, _Walk(), _parts(instance.artifact.path, values)
    looks: dict[str, _Look] = {}
    try:
        with _opened(root, values) as directory:
            for match in walk.outputs(directory, parts):
                try:
                    looks[match.path] = _look(match, artifact, digest)
                except _NotYet as reason:
                    walk.problems.append(f"{match.path}: {reason}")
                except OSError as error:
                    walk.trouble(match.path, error)
    except OSError as error:
        walk.trouble(str(root), error)
    problems = [*walk.problems, *(problem for look in looks.values() for problem in look.problems)]
    if len(looks) < artifact.count and not walk.problems:
        what = "a file" if artifact.count == 1 else f"at least {artifact.count} files"
        problems.append(f"{_plain(parts)}: found {len(looks) or 'nothing'}; expected {what}")
    answer: Answer = "pending" if problems else "valid"
    if any(look.answer == "invalid" for look in looks.values()):
        answer = "invalid"
    return Finding(instance.contract_id, answer, tuple(problems), tuple(look.fact for look in looks.values()))


def _look(match: Match, artifact: Artifact, digest: bool) -> _Look:
    """Open and judge one file. What is no plain file of its own is refused before it is opened, and after."""
    _refuse(match.status)
    descriptor = os.open(match.name, _FILE, dir_fd=match.directory)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        _refuse(status)
        if status.st_size == 0 and (artifact.non_empty or artifact.format == "json"):
            raise _NotYet("found an empty file; expected content")
        if artifact.format == "any":
            read = digest and status.st_size <= SIZE_CAP
            return _Look("valid", (), FileFact(match.path, status.st_size, _sha256(file, status) if read else None))
        if status.st_size > SIZE_CAP:
            problem = f"{match.path}: found {status.st_size} bytes; expected at most {SIZE_CAP} of JSON"
            return _Look("invalid", (problem,), FileFact(match.path, status.st_size, None))
        data = b"".join(_blocks(file, status))
    problems = tuple(f"{match.path}: {problem}" for problem in _json_problems(data, artifact.fields))
    fact = FileFact(match.path, len(data), hashlib.sha256(data).hexdigest())
    return _Look("invalid" if problems else "valid", problems, fact)


def _refuse(status: os.stat_result) -> None:
    """Raise _NotYet for what is no plain file, has a second name, or belongs to somebody else."""
    if not stat.S_ISREG(status.st_mode):
        raise _NotYet(f"found {_kind(status)}; expected a plain file")
    if status.st_nlink > 1:
        raise _NotYet(f"found a file with {status.st_nlink} names (hard links); expected one")
    if status.st_uid not in (0, os.geteuid()):
        raise _NotYet(f"found a file of user {status.st_uid}; expected one of user {os.geteuid()} or root")


def _blocks(file: io.FileIO, before: os.stat_result) -> Iterator[bytes]:
    """The whole content; raises _NotYet when the file is not what it was before reading."""
    size = 0
    while block := file.read(1 << 20):
        size += len(block)
        if size > before.st_size:
            break
        yield block
    after = os.fstat(file.fileno())
    if size != before.st_size or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise _NotYet("found a file that is being written; expected it to stay as it is")


def _sha256(file: io.FileIO, status: os.stat_result) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, status):
        digest.update(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- JSON rules


def _json_problems(data: bytes, rules: Mapping[str, FieldRule]) -> list[str]:
    """What is wrong with a whole JSON document. Raises _NotYet when it is not whole, or no JSON."""
    flaws: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                flaws.append(f"found the key {show(key)} twice in one object; expected it once")
            found[key] = value
        return found

    def constant(word: str) -> float:
        flaws.append(f"found {word}; expected JSON, which has finite numbers only")
        return 0.0

    def real(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(show(text))

    def whole(text: str) -> int:
        return int(text) if len(text) <= 4000 else int(constant(f"a number of {len(text)} digits"))

    try:
        document = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=whole
        )
    except RecursionError:
        return ["found lists or objects nested too deeply; expected less than a thousand levels"]
    except ValueError:  # JSONDecodeError and UnicodeDecodeError; where it broke off is another place at each look
        raise _NotYet("found no whole JSON document; expected one") from None
    if not isinstance(document, dict | list):
        return [f"found {_shown(document)}; expected a JSON object or list"]
    return flaws or [problem for path, rule in rules.items() for problem in _field_problems(document, path, rule)]


def _field_problems(document: Any, path: str, rule: FieldRule) -> list[str]:
    value = _lookup(document, path)
    if rule.exists is False:
        return [] if value is ABSENT else [f"{path}: found {_shown(value)}; expected no such field"]
    wanted = [
        (words.format(_shown(limit)), holds(value, limit))
        for name, words, holds in FIELD_RULES
        if (limit := getattr(rule, name)) is not None
    ]
    return [f"{path}: found {_shown(value)}; expected {words}" for words, holds in wanted if not holds]


def _lookup(document: Any, path: str) -> Any:
    """The value at a dotted path (`\\.` is a dot in a name, a number a place in a list), or ABSENT."""
    value = document
    for part in re.split(r"(?<!\\)\.", path):
        key = part.replace("\\.", ".")
        if isinstance(value, dict):
            value = value.get(key, ABSENT)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return ABSENT
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "nothing" if value is ABSENT else "an object" if isinstance(value, dict) else show(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, wanted: Any) -> bool:
    """Equal, and of the same kind: true is not 1, but 1.0 is."""
    alike = type(value) is type(wanted) or (_number(value) and _number(wanted))
    return alike and bool(value == wanted)


FIELD_RULES: Final[tuple[tuple[str, str, Callable[[Any, Any], bool]], ...]] = (
    ("exists", "a value", lambda value, limit: value is not ABSENT),
    ("equals", "{}", _same),
    ("min", "a number, {} or more", lambda value, limit: _number(value) and value >= limit),
    ("max", "a number, {} or less", lambda value, limit: _number(value) and value <= limit),
    (
        "length_min",
        "a length of {} or more",
        lambda value, limit: isinstance(value, str | list | dict) and len(value) >= limit,
    ),
)
"""Field of FieldRule, what it expects in words, and whether a value (or ABSENT) obeys its limit."""
