"""What watching is made of: file systems by name, trees on one inotify instance, looks without events."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.watch import filesystems, polling, trees
from supervisor.watch.filesystems import FileSystem, file_system
from supervisor.watch.polling import Pace, Sight, Target
from supervisor.watch.trees import Trees

LIMIT = 10.0

# --- file systems ----------------------------------------------------------------------------------------------------

MOUNTINFO = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,noatime shared:1 - ext4 /dev/vda1 rw
31 27 0:44 / /mnt/two\040words rw - fuse.sshfs me@there:/x rw
32 27 0:45 /sub /data rw master:2 propagate_from:2 - nfs4 server:/export rw
"""


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("27", FileSystem("ext4", "/")),
        ("31", FileSystem("fuse.sshfs", "/mnt/two words")),
        ("32", FileSystem("nfs4", "/data")),
        ("2", FileSystem("unknown", "")),
    ],
)
def test_a_mount_is_found_by_its_number(mount: str, expected: FileSystem) -> None:
    assert filesystems._row(MOUNTINFO, mount) == expected


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"])
def test_events_are_believed_where_every_writer_goes_through_this_kernel(kind: str) -> None:
    assert FileSystem(kind, "/").believed


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "other machines") for kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph")),
        *((kind, "behind it") for kind in ("fuse", "fuse.sshfs", "fuseblk")),
        ("9p", "its host"),
        ("wonderfs", "not known"),
        ("unknown", "not known"),
    ],
)
def test_events_are_not_believed_elsewhere_and_a_reason_is_given(kind: str, why: str) -> None:
    assert not FileSystem(kind, "/").believed
    assert why in FileSystem(kind, "/").reason


def test_the_kernel_says_what_a_descriptor_is_on() -> None:
    descriptor = os.open("/proc", os.O_RDONLY)
    try:
        assert file_system(descriptor) == FileSystem("proc", "/proc")
    finally:
        os.close(descriptor)
    assert file_system(-1).kind == "unknown"


# --- trees -----------------------------------------------------------------------------------------------------------


def as_tree(directory: Path, depth: int) -> trees.Tree:
    return str(directory.parent), str(directory), depth


class Watched:
    """Trees, and a way to wait for what they say."""

    def __init__(self, careful: bool) -> None:
        self.trees = Trees(careful)

    def settle(self, *tree: tuple[Path, int]) -> list[bool]:
        return [self.trees.settle(as_tree(*each)) for each in tree]

    def after(self, act: Callable[[], object]) -> tuple[set[trees.Tree], set[trees.Tree]]:
        """What is said after the act, all of it."""
        act()
        changed: set[trees.Tree] = set()
        unsettled: set[trees.Tree] = set()
        poll = select.poll()
        poll.register(self.trees.fileno(), select.POLLIN)
        while poll.poll(0):  # events are there when the call that makes them returns
            more, worse = self.trees.read()
            changed |= more
            unsettled |= worse
        return changed, unsettled


@pytest.fixture(params=[False, True], ids=["bold", "careful"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    mine = Watched(request.param)
    yield mine
    mine.trees.close()


def test_a_change_is_told_to_the_trees_that_it_is_in(watched: Watched, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    assert watched.settle((a, 0), (b, 0), (a, 0)) == [True, True, False]
    assert watched.after((a / "x").touch) == ({as_tree(a, 0)}, set())
    assert watched.after(lambda: (a / "x").rename(b / "x"))[0] == {as_tree(a, 0), as_tree(b, 0)}
    assert watched.after((b / "x").unlink)[0] == {as_tree(b, 0)}
    assert watched.after((tmp_path / "c").touch) == (set(), set())


def test_a_file_that_only_grows_is_no_event_until_it_is_closed(watched: Watched, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        watched.settle((tmp_path, 0))
        log.write("x")
        assert watched.after(log.flush) == (set(), set())
    assert watched.after(lambda: None)[0] == {as_tree(tmp_path, 0)}


def test_two_trees_share_a_watch_and_the_last_takes_it_along(watched: Watched, tmp_path: Path) -> None:
    shallow, deep = as_tree(tmp_path, 0), as_tree(tmp_path, 1)
    watched.settle((tmp_path, 0), (tmp_path, 1))
    assert watched.after((tmp_path / "x").touch)[0] == {shallow, deep}
    watched.trees.drop(shallow)
    assert watched.after((tmp_path / "y").touch)[0] == {deep}
    watched.trees.drop(deep)
    assert watched.after((tmp_path / "z").touch) == (set(), set())


def test_directories_below_are_watched_to_the_depth(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "1/2/3").mkdir(parents=True)
    tree = as_tree(tmp_path, 2)
    watched.settle((tmp_path, 2))
    assert watched.after((tmp_path / "1/2/x").touch) == ({tree}, set())
    assert watched.after((tmp_path / "1/2/3/x").touch) == (set(), set())
    assert watched.after((tmp_path / "1/new").mkdir) == ({tree}, {tree})
    assert watched.settle((tmp_path, 2)) == [True]
    assert watched.after((tmp_path / "1/new/x").touch) == ({tree}, set())


def test_a_link_to_a_directory_is_not_followed(watched: Watched, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    watched.settle((inside, 3))
    assert watched.after((outside / "x").touch) == (set(), set())


def test_a_missing_directory_is_waited_for_above_it(watched: Watched, tmp_path: Path) -> None:
    late = tmp_path / "a/b"
    tree = as_tree(late, 0)
    assert watched.settle((late, 0)) == [True]
    assert watched.after((tmp_path / "neighbour").touch) == (set(), set())
    assert watched.after((tmp_path / "a").mkdir) == ({tree}, {tree})
    watched.settle((late, 0))
    assert watched.after((tmp_path / "other").mkdir) == (set(), set())
    assert watched.after(late.mkdir) == ({tree}, {tree})
    watched.settle((late, 0))
    assert watched.after((late / "x").touch) == ({tree}, set())


@pytest.mark.parametrize("leave", ["remove", "rename"])
def test_a_directory_that_leaves_and_comes_again(watched: Watched, tmp_path: Path, leave: str) -> None:
    place = tmp_path / "place"
    tree = as_tree(place, 0)
    place.mkdir()
    watched.settle((place, 0))
    going = place.rmdir if leave == "remove" else lambda: place.rename(tmp_path / "elsewhere")
    assert watched.after(going) == ({tree}, {tree})
    watched.settle((place, 0))
    assert watched.after(place.mkdir) == ({tree}, {tree})
    assert watched.settle((place, 0)) == [True]
    if leave == "rename":
        assert watched.after((tmp_path / "elsewhere/x").touch) == (set(), set())
    assert watched.after((place / "x").touch) == ({tree}, set())


def test_a_directory_whose_parent_was_replaced_is_found_by_settling(watched: Watched, tmp_path: Path) -> None:
    place = tmp_path / "a/b"
    place.mkdir(parents=True)
    watched.settle((place, 0))
    (tmp_path / "a").rename(tmp_path / "old")
    place.mkdir(parents=True)
    assert watched.after((place / "x").touch) == (set(), set())  # no watch tells that
    assert watched.settle((place, 0)) == [True]
    assert watched.after((place / "y").touch)[0] == {as_tree(place, 0)}


def test_a_tree_has_its_limit_and_keeps_what_could_be_watched(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "LIMIT", 3)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(OSError, match="more than 3 directories") as caught:
        watched.settle((tmp_path, 1))
    assert caught.value.errno == errno.E2BIG
    assert watched.after((tmp_path / "x").touch)[0] == {as_tree(tmp_path, 1)}


def test_an_overflow_is_everybodys_business_once(watched: Watched, tmp_path: Path) -> None:
    loud, quiet = tmp_path / "loud", tmp_path / "quiet"
    loud.mkdir()
    quiet.mkdir()
    watched.settle((loud, 0), (quiet, 0))
    room = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    names = [loud / "a", loud / "b"]
    names[0].touch()
    for number in range(room // 2 + 2):  # two events each
        names[number % 2].rename(names[1 - number % 2])
    both = {as_tree(loud, 0), as_tree(quiet, 0)}
    assert watched.after(lambda: None) == (both, both)
    assert [watched.trees.lost(), watched.trees.lost()] == [True, False]
    assert watched.after((quiet / "x").touch) == ({as_tree(quiet, 0)}, set())


# --- looks without events --------------------------------------------------------------------------------------------


def look(target: Target, known: str | None = None, names: bool = True) -> tuple[str, Sight]:
    with polling.opened(target, known or polling.TOP, lambda _: False) as found:
        return found.path, polling.look(found, target.depth, names)


def test_a_look_sees_names_and_directories_and_not_what_files_hold(tmp_path: Path) -> None:
    target = Target(str(tmp_path), str(tmp_path), 1)
    (tmp_path / "d").mkdir()
    (tmp_path / "log").touch()
    seen = [look(target)[1]]

    def changed() -> bool:
        seen.append(look(target)[1])
        return seen[-1] != seen[-2]

    (tmp_path / "log").write_text("grows")
    assert not changed()
    (tmp_path / "x").touch()
    assert changed()
    (tmp_path / "d/y").touch()
    assert changed()
    (tmp_path / "d/deeper").mkdir()
    assert changed()
    (tmp_path / "d/deeper/z").touch()  # below the depth
    assert not changed()
    (tmp_path / "x").rename(tmp_path / "w")
    assert changed()
    (tmp_path / "d").rename(tmp_path / "old")
    (tmp_path / "d").mkdir()
    assert changed()


def test_a_directory_that_was_replaced_by_one_alike_is_another(tmp_path: Path) -> None:
    place = tmp_path / "place"
    target = Target(str(tmp_path), str(place))
    place.mkdir()
    os.utime(place, (1, 1))
    before = look(target)[1]
    place.rename(tmp_path / "old")
    place.mkdir()
    os.utime(place, (1, 1))
    assert look(target)[1] != before


def test_a_missing_directory_is_looked_for_from_the_one_above(tmp_path: Path) -> None:
    target = Target(str(tmp_path / "root"), str(tmp_path / "root/a/b"))
    known, sight = look(target)
    assert (known, sight.there) == (str(tmp_path), False)
    (tmp_path / "root/a").mkdir(parents=True)
    known, sight = look(target, known)
    assert (known, sight.there) == (str(tmp_path / "root/a"), False)
    (tmp_path / "root/a/neighbour").touch()
    assert look(target, known) == (known, sight)  # nothing of ours has come
    (tmp_path / "root/a/b").mkdir()
    known, sight = look(target, known)
    assert (known, sight.there) == (target.directory, True)
    (tmp_path / "root/a").rename(tmp_path / "gone")
    assert look(target, known)[0] == str(tmp_path / "root")


def test_neither_a_link_nor_a_file_is_the_directory(tmp_path: Path) -> None:
    target = Target(str(tmp_path), str(tmp_path / "a"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    assert not look(target)[1].there
    (tmp_path / "a").unlink()
    (tmp_path / "a").touch()
    assert not look(target)[1].there


def test_more_directories_than_a_look_goes_into_may_hide_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "DIRECTORIES", 3)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
    assert look(Target(str(tmp_path), str(tmp_path), 1))[1].partial
    assert not look(Target(str(tmp_path), str(tmp_path), 0))[1].partial


def test_looks_come_soon_after_a_change_and_slow_down_to_five_seconds() -> None:
    pace = Pace()
    pauses = [pace.next() for _ in range(30)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.05, 5.0)
    pace.quicken()
    assert pace.next() == 0.05


def test_after_a_hint_looks_come_at_once_and_again_for_a_second_and_a_half() -> None:
    pace = Pace()
    pace.hint()
    pauses = [(pace.next(), pace.urgent) for _ in range(6)]
    assert pauses == [(0.005, True), (0.02, True), (0.08, True), (0.32, True), (1.0, True), (0.05, False)]
