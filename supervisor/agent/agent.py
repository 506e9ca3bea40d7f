"""The agent: the program that runs beside one rank, on the rank's node.

    python -I -S agent.pyz run NONCE RANK    beside a rank; standard input and output are the channel
    python -I -S agent.pyz sweep TAG         kill what a rank has left behind, and say on one line how much
    python -I -S agent.pyz fetch             copy files from this node's disks, see fetch.py

THE CHANNEL. One JSON object a line, at most 1000 bytes, each with the run's nonce under "n". Lines without it
belong to somebody else (a prolog, a container's banner) and are ignored. Commands carry their name under "c",
events under "e". What is longer than a line, the specification of the rank, travels in pieces.

    engine -> agent                            agent -> engine
    spec {part, more}   a piece of the spec    hello {host, pid, node, step, attempt, python, rank}
    start {}            the second phase       started {pid}                  exec has succeeded
    stop {signal, grace, exit}                 refused {phase, errno, error}  there will be no rank
    kill {exit}         KILL everything now    ended {code, signal, core}     its main process, at once
    bye {exit}          leave with this code   gone {killed, left}            nothing of it runs any more
    ping {}                                    signalled {signal}   pong {}   hint {}   note {text}

    spec: argv, tag, out, err (paths), and with defaults env {}, unset [], cwd null, stop_signal 15, grace 30,
          lease 600: seconds without a command after which the channel counts as ended,
          watch []: [root, directory, levels below it] of what hints tell the changes of, see hints.py,
          fetch null: the specification of what bye makes it fetch first

TWO PHASES. The agent first arms itself (handlers, subreaper), then says hello. Nothing runs before the engine
has answered with spec and start, so that all ranks begin together, or none does. A stop that comes earlier
means that nothing is ever started. Between fork and exec the child would take a signal with the agent's
handlers, so a stop that falls in there waits for the exec.

WHO DECIDES. The engine. The agent reports what it sees and does what it is told; only two things make it act
alone: a signal (Slurm wants the step to end: it reports, then stops the rank as the spec says), and the end
of the channel: standard input at its end, or standard output without a reader. Then nobody is left who could
ever stop this rank: TERM at once, KILL after 1.5 s, exit 70, all within 2 s. Where the engine's host has died nobody
closes the channel, and Slurm was seen not to notice the end of an srun that was killed with its engine: then the lease
runs out, which every command renews, a ping every 5 s.

THE STORY. Every run of an agent is a path through these states, and `gone` is the last event of every path.

    WAITING --start--> STARTING --exec succeeded: started--> RUNNING --main process ended: ended--> CLEARING
       |                  |                                                                            |
       | stop, kill, bye, | exec failed: refused                              nothing left of the tree |
       | refused          +------------------------> CLEARING                                          v
       +-------------------------------> GONE <------------------ logs on disk: gone ------------- FLUSHING

A RANK IS A TREE, not a process and not a group. The agent is a child subreaper: whatever is orphaned below
it, setsid and double forks included, becomes its child. So "no descendants" is not a guess from a listing of
/proc: it is what waitpid says when there is no child. The listing is for finding whom to signal, and for the
few that got away from under the subreaper: those carry ALLOCD_TAG in their environment. A tag belongs to one
rank of one run and to nothing else, for whatever carries it is killed. When the main process ends, leftovers
get TERM, and KILL after the grace. If the agent itself dies, the kernel kills the main process (parent-death
signal), and `sweep` is for the rest.

FETCHING. What the rank wrote on its node's own disks is copied by a child of the agent, between bye and the exit:
its tree is gone then, so nothing is signalled later for it; and the agent is still there, which after scancel no
new step could be. The copy tells of itself in a file (fetch.py), and is killed with the agent or at its limit.

EXIT CODE, the first that is known: 70 if the channel ended before `gone`; bye's; that of the last stop or
kill; the rank's own (128 + signal; 127 program not found, 126 otherwise not started).

HINTS. What changes in the directories to watch is told by `hint`: at once, and while more comes, every 20 ms. The last
of many is never left out; but like a pong, a hint is dropped while the channel is stuck.

The loop sleeps until a descriptor or a deadline is due, without any tick: a rank that just runs costs no
wake-up.
"""

from __future__ import annotations

import errno
import json
import os
import select
import selectors
import signal
import sys
import time

from supervisor.agent.channel import GRACE_LIMIT, LEASE, Channel, Spec, between, encode, introduction
from supervisor.agent.processes import (
    EXIT_FAILED,
    EXIT_FAULT,
    EXIT_LOST,
    EXIT_NOT_FOUND,
    EXIT_REFUSED,
    EXIT_USAGE,
    KILL_PAUSE,
    PR_SET_CHILD_SUBREAPER,
    Tree,
    become,
    bring,
    children,
    fork,
    prctl,
    process,
    sweep,
    write_down,
)

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of ours
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from supervisor.agent.hints import Hints

# What the engine relies on: bytes, seconds, exit codes.
NONCE_LIMIT = 200  # characters
SPEC_LIMIT = 4 << 20  # characters; more than the kernel takes as arguments and environment
FAREWELL = 120.0  # a finished agent waits that long for bye
STAND_BACK = 0.01  # from the report of an end to the look for leftovers, see tidy
LINGER = 0.1  # from the report of a failure to the exit, see leave_soon
LOST_GRACE, LOST_LIMIT = 1.5, 1.8  # when the channel has ended: to KILL, and to leaving whatever resists it
KILL_LIMIT = 10.0  # from the first KILL to giving up: another user's process, or one stuck in the kernel
LOOK_PAUSE = 0.25  # between two looks at processes whose end no signal announces
FETCH_MARGIN = 2.0  # a fetch that is still there so long after its own limit hangs
HINT_PAUSE = 0.02  # between two hints
FLUSH_LIMIT, LOST_FLUSH = 5.0, 0.1  # for the logs to reach the disk; when the channel has ended
SIGNAL_BASE = 128

WAITING, STARTING, RUNNING = "waiting", "starting", "running"
CLEARING, FLUSHING, GONE = "clearing", "flushing", "gone"
HAS_TREE = (STARTING, RUNNING, CLEARING)
CODE_ORDER = ("channel", "bye", "order", "own")  # whose exit code counts, see the essay

# Signals to the agent. The first row stops the rank. The second would end the agent by default
# (`--signal=USR1@60` reaches every task) and is reported, no more: Slurm gives it to the rank's own too.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
REPORTED = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGIO, signal.SIGPWR, signal.SIGXCPU, signal.SIGXFSZ),
)


class Agent:
    """Keeps one rank. All that it waits for is in two tables: descriptors in `selector`, deadlines in
    `due`."""

    def __init__(self, nonce: str, rank: int) -> None:
        self.rank = rank
        self.state = WAITING
        self.parts: list[str] = []
        self.spec: Spec | None = None
        self.main = 0  # the rank's main process, until it has been reaped: so long its number is its own
        self.report = -1  # where the child says why there was no exec
        self.logs: list[int] = []
        self.flusher = self.fetcher = 0
        self.ordered = 0  # the last stop signal that was asked for
        self.told = 0  # the process group that has got it, but for those born since `heard` (see Process.born)
        self.heard = 0
        self.pause = KILL_PAUSE[0]
        self.left = 0
        self.told_at = float("-inf")  # when `ended` or `refused` was said
        self.codes = {"own": EXIT_FAILED}
        self.ran = self.lost = self.dismissed = self.finished = False
        self.hints: Hints | None = None
        self.hinted_at = float("-inf")
        self.due: dict[Callable[[], None], float] = {}
        self.selector = selectors.PollSelector()  # it takes files and /dev/null too, which epoll refuses
        self.channel = Channel(nonce, self.selector, self.on_command, lambda: self.hasten(self.on_channel_end, 0.0))
        self.emit, self.note = self.channel.emit, self.channel.note
        self.tree = Tree(self.note)

    def run(self) -> int:
        """From the first breath to the exit code."""
        self.arm()
        while not self.finished:
            wait = max(0.0, min(self.due.values()) - time.monotonic()) if self.due else None
            for key, _ in self.selector.select(wait):
                key.data()
            now = time.monotonic()
            for action in [action for action, when in self.due.items() if when <= now]:
                if self.due.pop(action, None) is not None:  # unless the one before has called it off
                    action()
        return next(self.codes[whose] for whose in CODE_ORDER if whose in self.codes)

    def arm(self) -> None:
        """The first phase: from here on nothing catches us unprepared. Then hello."""
        trouble = ""
        try:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        except OSError as error:
            trouble = f"no subreaper, so orphans are found by their tag only: {error}"
        for name in os.listdir("/proc/self/fd"):  # what was left open above us is not for the rank
            try:
                os.set_inheritable(int(name), int(name) <= 2)
            except OSError:
                pass  # the descriptor of this very listing
        self.wakeup, wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for caught in (signal.SIGCHLD, *STOPPING, *REPORTED):
            signal.signal(caught, lambda *_: None)  # its number arrives on the wakeup pipe
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.selector.register(self.wakeup, selectors.EVENT_READ, self.on_wakeup)  # first: the fast path
        self.channel.listen()
        self.hasten(self.on_lease_end, LEASE)
        self.emit("hello", **introduction(), rank=self.rank)
        if trouble:
            self.note(trouble)

    def hasten(self, action: Callable[[], None], delay: float) -> None:
        """Let the action be due in `delay` seconds, if it was not due earlier anyway."""
        when = time.monotonic() + delay
        self.due[action] = min(when, self.due.get(action, when))

    # commands

    def on_command(self, command: dict[str, Any]) -> None:
        self.due[self.on_lease_end] = time.monotonic() + (self.spec.lease if self.spec else LEASE)
        COMMANDS.get(str(command.get("c")), Agent.on_unknown)(self, command)

    def on_unknown(self, command: dict[str, Any]) -> None:
        self.note(f"unknown command {command.get('c')!r:.60}")

    def on_ping(self, _: dict[str, Any]) -> None:
        self.emit("pong")

    def on_spec(self, command: dict[str, Any]) -> None:
        if self.state != WAITING:
            self.note(f"spec came while {self.state}: ignored")
            return
        self.parts.append(str(command.get("part")))
        if sum(map(len, self.parts)) > SPEC_LIMIT:
            self.refuse("spec", f"longer than {SPEC_LIMIT} characters")
        elif not command.get("more"):
            document, self.parts = "".join(self.parts), []
            try:
                self.spec = Spec(json.loads(document))
            except (ValueError, RecursionError) as error:
                self.refuse("spec", str(error))
            else:
                self.tree.tag = self.spec.tag
                if self.spec.watch:
                    self.get_ready_to_watch(self.spec)

    def on_start(self, _: dict[str, Any]) -> None:
        if self.state != WAITING:
            self.note(f"start came while {self.state}: ignored")
        elif self.spec is None:
            self.refuse("spec", "start came before a whole spec")
        else:
            self.start(self.spec)

    def on_stop(self, command: dict[str, Any]) -> None:
        number, grace = self.manner()
        self.take_code("order", command)
        number = int(self.detail(command, "signal", 1, 64, number))
        self.stop(number, self.detail(command, "grace", 0, GRACE_LIMIT, grace))

    def on_kill(self, command: dict[str, Any]) -> None:
        self.take_code("order", command)
        self.stop(signal.SIGKILL, 0.0)

    def on_bye(self, command: dict[str, Any]) -> None:
        self.take_code("bye", command)
        self.dismissed = True
        if self.state == WAITING:
            self.gone()
        elif self.state == GONE:
            self.leave_soon()

    def take_code(self, whose: str, command: dict[str, Any]) -> None:
        if "exit" in command:
            self.codes[whose] = int(self.detail(command, "exit", 0, 255, EXIT_FAULT))

    def detail(self, command: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
        """A number of a command. A bad one is noted and replaced: a stop with a wrong detail still stops."""
        try:
            return between(command.get(name, default), name, low, high)
        except ValueError as error:
            self.note(f"{command['c']}: {error}")
            return default

    def manner(self) -> tuple[int, float]:
        """How a rank is stopped when nobody says how: signal, and seconds of grace."""
        return (self.spec.stop_signal, self.spec.grace) if self.spec else (signal.SIGTERM, 0.0)

    # starting

    def start(self, spec: Spec) -> None:
        """The second phase: open the logs, fork. Whether exec succeeded is learnt in `launched`."""
        phase = ""
        try:
            for name, path in spec.logs:
                phase = name
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_CLOEXEC
                self.logs.append(os.open(path, flags, 0o666))
            phase = "fork"
            self.report, report_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            keeper = os.getpid()
            self.main = fork()
        except OSError as error:
            self.refuse(phase, str(error.strerror), error.errno or 0)
            return
        if self.main == 0:
            become(spec, keeper, report_end, self.logs)
        os.close(report_end)
        self.state = STARTING
        self.selector.register(self.report, selectors.EVENT_READ, self.launched)

    def launched(self) -> None:
        """The report pipe speaks: why there is no exec, or nothing, closed by the exec or by an early
        death."""
        words = os.read(self.report, select.PIPE_BUF).decode("utf-8", "replace")
        self.selector.unregister(self.report)
        os.close(self.report)
        if self.state == STARTING:
            self.judge(words)
        self.reap()

    def judge(self, words: str) -> None:
        """What the child said, or its silence, decides between `refused` and `started`."""
        child = process(self.main)  # a zombie at least, for only we reap it
        if words:
            phase, number, error = words.split(" ", 2)
            self.refuse(phase, error, int(number))
        elif child is None or not child.execed:
            self.refuse("exec", "ended before exec")
        else:
            self.state, self.ran = RUNNING, True
            self.emit("started", pid=self.main)
            if self.ordered and self.ordered != signal.SIGKILL:
                self.tell(self.ordered)
            self.watch()

    def refuse(self, phase: str, error: str, number: int = 0) -> None:
        missing = phase == "exec" and number == errno.ENOENT
        self.codes["own"] = EXIT_NOT_FOUND if missing else EXIT_REFUSED
        born = self.state == STARTING
        self.state, self.main = CLEARING, 0
        self.emit("refused", phase=phase, errno=number, error=error)
        self.told_at = time.monotonic()
        if not born:
            self.gone()

    # hints

    def get_ready_to_watch(self, spec: Spec) -> None:
        from supervisor.agent.hints import Hints  # here: most agents do without, and stay smaller

        try:
            self.hints = Hints(spec.watch)
        except OSError as error:
            self.note(f"no hints about files from this node: {error}")

    def watch(self) -> None:
        """Have the changes told in the directories that the spec names, if it names any."""
        if self.hints is not None:
            self.selector.register(self.hints.fileno(), selectors.EVENT_READ, self.on_hints)
            try:
                self.hints.begin()
            except RuntimeError as error:
                self.note(f"no hints about files from this node: {error}")

    def on_hints(self) -> None:
        assert self.hints is not None  # noqa: S101 - its descriptor brought us here
        for words in self.hints.heard():
            if words:
                self.note(words)
            else:
                self.due.setdefault(self.hint, self.hinted_at + HINT_PAUSE)

    def hint(self) -> None:
        self.hinted_at = time.monotonic()
        self.emit("hint")

    # stopping

    def stop(self, number: int, grace: float) -> None:
        """The signal to the rank's group, KILL to whatever is left after the grace. A later stop can only hasten
        that, and does not repeat the signal: many programs take a second TERM for `drop everything`."""
        if self.state == WAITING:
            self.gone()
        if self.state in HAS_TREE:
            repeated, self.ordered = number == self.ordered, number
            if number == signal.SIGKILL:
                grace = 0.0  # that one is for everybody, and nothing is left to wait for
            elif self.state == RUNNING and not repeated:
                self.tell(number)
            self.hasten(self.kill, grace)

    def tell(self, number: int) -> None:
        """Signal the group that the main process leads. CONT lets a suspended rank see it."""
        self.told = self.main
        self.heard = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        try:
            os.killpg(self.main, number)
            os.killpg(self.main, signal.SIGCONT)
        except ProcessLookupError:
            pass
        except PermissionError:
            self.note("the rank cannot be signalled: its processes belong to another user")

    def kill(self) -> None:
        """A round of KILL, and after a pause the next, until `reap` finds that nobody is left."""
        self.due.setdefault(self.give_up, time.monotonic() + KILL_LIMIT)
        self.due[self.kill] = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, KILL_PAUSE[1])
        self.tree.strike(self.tree.alive())

    def give_up(self) -> None:
        alive = [str(each.pid) for each in self.tree.alive()]
        self.left = len(alive)
        if self.main:
            self.main, self.codes["own"] = 0, SIGNAL_BASE + signal.SIGKILL
        self.note(f"given up on processes that survive KILL: {', '.join(alive)}")
        self.flush()

    # ending

    def on_wakeup(self) -> None:
        """Signals have come. Children first, and always: a full pipe may have swallowed the word of them."""
        caught = os.read(self.wakeup, 4096)
        self.reap()
        for number in dict.fromkeys(caught):
            if number != signal.SIGCHLD:
                self.on_signal(number)

    def on_signal(self, caught: int) -> None:
        self.emit("signalled", signal=caught)
        if caught in STOPPING and not self.ordered:
            if self.state == WAITING:
                self.codes["own"] = SIGNAL_BASE + caught
            self.stop(*self.manner())

    def reap(self) -> None:
        """Collect the dead: the main process first, for the engine waits for that one, then the orphans."""
        if self.state == STARTING:
            return  # the report pipe closes before its owner dies: `launched` comes first, and then this
        main = self.main
        if main:
            self.collect(main)
        childless = self.collect(-1)
        killing = self.give_up in self.due
        if self.state != CLEARING:
            return
        if main and not killing:
            self.hasten(self.tidy, STAND_BACK if self.ordered or self.codes["own"] else 0.0)
            return
        if childless:
            self.look()
        elif killing:  # what comes down to us in the middle of it: one that forks faster than a listing can follow
            self.tree.strike(children())  # is caught here
        if main and self.state == CLEARING:
            self.clear()

    def collect(self, which: int) -> bool:
        """Reap the dead of the children that waitpid(2) takes `which` for; whether there are none, dead or alive. Any
        round may meet the main process: it can die while the orphans are collected."""
        try:
            while True:
                pid, status = os.waitpid(which, os.WNOHANG)
                if pid == 0:
                    return False
                if pid == self.main:
                    self.ended(status)
                elif pid == self.flusher:
                    self.flushed(status)
                elif pid == self.fetcher:
                    self.leave()
        except ChildProcessError:
            return True

    def ended(self, status: int) -> None:
        """The fast path: nothing stands between the death and this line."""
        self.state, self.main = CLEARING, 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        self.emit("ended", code=code, signal=killer, core=os.WCOREDUMP(status))
        self.told_at = time.monotonic()
        self.codes["own"] = SIGNAL_BASE + killer if killer else code or 0

    def tidy(self) -> None:
        """See to what the main process has left behind. That reads all of /proc, and comes second unless the end was an
        unasked success: other ranks are being stopped then, and some may wait for this very processor."""
        if self.collect(-1):
            self.look()
        if self.state == CLEARING:
            self.clear()

    def clear(self) -> None:
        """The main process has left others behind: TERM, unless a stop has told them already, and KILL after the
        grace. Not told is also who was born later, by a handler, or in the same tick: a shell's child has the shell's
        handlers until its exec, and loses what comes then."""
        for each in self.tree.alive():
            if each.group != self.told or each.born >= self.heard:
                self.tree.signal(each, signal.SIGTERM)
        self.hasten(self.kill, self.manner()[1])

    def look(self) -> None:
        """No child, hence no descendant. If something got away from below us, no signal tells its end: look again."""
        if self.tree.astray():
            self.due[self.look] = time.monotonic() + LOOK_PAUSE
        else:
            self.flush()

    def flush(self) -> None:
        """Nothing is left. The logs go to the disk by a child's hand: a dead file system must not silence
        us."""
        self.state = FLUSHING
        for action in (self.kill, self.give_up, self.look, self.tidy):
            self.due.pop(action, None)
        try:
            self.flusher = fork()
        except OSError as error:
            self.note(f"the logs were not brought to the disk: {error.strerror}")
            self.gone()
            return
        if self.flusher == 0:
            write_down(self.logs)
        self.hasten(self.unflushed, LOST_FLUSH if self.lost else FLUSH_LIMIT)

    def flushed(self, status: int) -> None:
        number = os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EINTR
        if number:
            self.note(f"the logs did not reach the disk: {os.strerror(number)}")
        self.due.pop(self.unflushed, None)
        self.gone()

    def unflushed(self) -> None:
        self.flusher = 0
        self.note("the logs did not reach the disk in time")
        self.gone()

    def gone(self) -> None:
        self.state = GONE
        self.emit("gone", killed=len(self.tree.killed), left=self.left)
        self.hasten(self.leave, FAREWELL)
        if self.lost or self.dismissed:
            self.leave_soon()

    def leave_soon(self) -> None:
        """At once; but after a failure the others are stopped first, with which our launcher's teardown would
        compete for the CPU."""
        failing = not self.ordered and self.codes["own"] != 0
        errand = self.spec is not None and self.spec.fetch is not None and not self.fetcher
        way = self.fetch if errand and self.ran and not self.lost else self.leave
        self.due[way] = max(time.monotonic(), self.told_at + (LINGER if failing else 0.0))

    def fetch(self) -> None:
        """The rank's files on this node, by a child's hand: a dead file system must not hold us."""
        assert self.spec is not None  # noqa: S101 - see leave_soon
        assert self.spec.fetch is not None  # noqa: S101 - see leave_soon
        try:
            keeper = os.getpid()
            self.fetcher = fork()
        except OSError as error:
            self.note(f"nothing was fetched from the node: {error.strerror}")
            self.leave()
            return
        if self.fetcher == 0:
            bring(self.spec.fetch, keeper)
        self.due[self.leave] = time.monotonic() + self.spec.fetch["seconds"] + FETCH_MARGIN

    def leave(self) -> None:
        self.finished = True

    def on_lease_end(self) -> None:
        self.note("no word from the engine for too long: it counts as gone")
        self.on_channel_end()

    def on_channel_end(self) -> None:
        """Nobody hears us, or nobody speaks to us: the one case in which we decide."""
        if self.lost:
            return
        self.lost = True
        if self.state == GONE:
            self.leave_soon()
            return
        self.codes["channel"] = EXIT_LOST
        if self.state in HAS_TREE:
            self.hasten(self.give_up, LOST_LIMIT)
        elif self.state == FLUSHING:
            self.hasten(self.unflushed, LOST_FLUSH)
        self.stop(signal.SIGTERM, LOST_GRACE)


COMMANDS: dict[str, Callable[[Agent, dict[str, Any]], None]] = {
    "spec": Agent.on_spec,
    "start": Agent.on_start,
    "stop": Agent.on_stop,
    "kill": Agent.on_kill,
    "bye": Agent.on_bye,
    "ping": Agent.on_ping,
}


def keep(nonce: str, rank: int) -> int:
    """`run`: the exit code. A defect of ours leaves no rank behind: KILL, the traceback on stderr, 125."""
    agent = Agent(nonce, rank)
    try:
        return agent.run()
    except Exception:  # noqa: BLE001 - a defect of ours, see above
        agent.tree.strike(agent.tree.alive())
        sys.excepthook(*sys.exc_info())
        return EXIT_FAULT


def main(arguments: list[str]) -> int:
    verb, *rest = arguments or [""]
    if verb == "run" and len(rest) == 2 and 0 < len(rest[0]) <= NONCE_LIMIT and rest[1].isdecimal():
        return keep(rest[0], int(rest[1]))
    if verb == "sweep" and len(rest) == 1 and rest[0]:
        killed, left = sweep(os.fsencode(rest[0]))
        os.write(1, encode({"e": "swept", "killed": killed, "left": left}))
        return 1 if left else 0
    if verb == "fetch" and not rest:
        from supervisor.agent import fetch  # not for a rank's agent, which stays small

        return fetch.main()
    sys.stderr.write("usage: agent.pyz run NONCE RANK | agent.pyz sweep TAG | agent.pyz fetch\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
