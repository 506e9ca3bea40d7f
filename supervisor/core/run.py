"""The run machine: (state, record) -> (state, commands). It decides; everything else reports or obeys.

How a run ends, in the order of the rules below:

* A critical rank that fails ends the run at once (`peer_failed`): a non-zero end of the coordinator, any end of a
  worker before the run may end (zero counts as 1), a step that says no hello, a command that cannot be executed, an
  agent that dies or stays silent. All other ranks are stopped in the same turn. The first failure is the one with the
  lowest journal number; ends that come after the decision are consequences and never failures.
* A worker's death has a second look, for up to `marker.recheck` seconds, when the coordinator has ended already, does
  not answer, or publishes the marker itself: it may have died *because* the work is done. A marker that appears
  meanwhile, or the end of the run, judges it; otherwise it is the failure that it looked like, under its own sequence
  number.
* A zero of the coordinator is believed after a look at marker and note (a script may have noted a failed part), and
  then waits until every contract is complete, invalid or late. Only then is the marker published, and only when it is
  there are the workers stopped (`completed`). Failures pass this barrier. A marker that turns out to say something
  else, or cannot be published, takes the success back.
* `finish = "artifacts"`: the same without a coordinator. The work is done when every contract has come to its end, or
  when no rank is left that could still write; the same look follows.
* Deadlines, the time limit and requests to stop end it in order: the coordinator, then the workers.
* Ends that Slurm's own word may explain are *provisional* (`End.provisional`): deaths by TERM or KILL that we did not
  order, ends after somebody else signalled the agent, and ends of peers of a node that was lost.

Timers are state (`RunState.deadlines`), not commands: a fold of the records restores them. After every event the RULES
run until none changes anything; each rule is a sentence about the state, so that no handler has to remember what
else its event may set free.

An illegal event raises IllegalEvent with the run's story and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core import on_evidence, on_ranks, on_run, timers
from supervisor.core.rules import run_rules
from supervisor.core.state import RunState
from supervisor.core.turn import IllegalEvent, Turn

__all__ = ["IllegalEvent", "fold", "step"]


def step(state: RunState, record: ev.Record) -> tuple[RunState, list[cmd.Command]]:
    """The next state and what to do now. Raises IllegalEvent; `state` is unchanged then (it is frozen)."""
    turn = Turn(state, record)
    if turn.permit(record.event):
        HANDLERS[type(record.event)](turn, record.event)
    if turn.state.phase != "new":
        run_rules(turn)
    turn.drop_timers()
    return turn.state, turn.commands


def fold(records: Iterable[ev.Record]) -> RunState:
    """The state after all records, as recovery and every view compute it. Raises IllegalEvent."""
    state = RunState()
    for record in records:
        state, _ = step(state, record)
    return state


HANDLERS: Final[dict[type[ev.Event], Callable[[Turn, Any], None]]] = {
    ev.RunOpened: on_run.opened,
    ev.TimeLimitKnown: on_run.time_limit_known,
    ev.StopRequested: on_run.stop_requested,
    ev.TimerFired: timers.timer_fired,
    ev.Noted: on_run.noted,
    ev.EngineFault: on_run.engine_fault,
    ev.StepSpawned: on_ranks.spawned,
    ev.StepRefused: on_ranks.step_refused,
    ev.Hello: on_ranks.hello,
    ev.RankStarted: on_ranks.started,
    ev.RankRefused: on_ranks.refused,
    ev.RankEnded: on_ranks.rank_ended,
    ev.TreeGone: on_ranks.tree_gone,
    ev.AgentSignalled: on_ranks.agent_signalled,
    ev.RankSilent: on_ranks.silent,
    ev.RankHeard: on_ranks.heard,
    ev.StepEnded: on_ranks.step_ended,
    ev.Swept: on_ranks.swept,
    ev.MarkerRead: on_evidence.marker_read,
    ev.MarkerPublished: on_evidence.marker_published,
    ev.MarkerFailed: on_evidence.marker_failed,
    ev.WatchChanged: on_evidence.watch_changed,
    ev.ArtifactSeen: on_evidence.artifact_seen,
    ev.ArtifactsLooked: on_evidence.artifacts_looked,
    ev.CheckerFault: on_evidence.checker_fault,
    ev.Collected: on_evidence.collected,
}
