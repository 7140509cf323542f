"""All that is known of a run from the files in its workdir; read on from where one was, in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.observe.files import read_json
from ddiloco.observe.tally import RECENT_STEPS
from ddiloco.page.tail import LineTail, Replaced
from ddiloco.page.timeline import Lane, Slots

RECENT = 64  # rounds that `recent` figures are of
SHOWN_EVENTS = 200
STANDSTILL = 10.0  # steps without a step
LEAST_STANDSTILL = 5.0  # seconds
LATEST = sys.float_info.max  # seconds, of all that is known; of nothing more it is infinite
BEHIND = 1.5  # seconds that steps may come later into their file than rounds into theirs
ALIVE = 30.0  # seconds for which a run that does not refresh its summary is still taken to go on

KIND = {
    "stepping": "stepping",
    "skipping": "stepping",
    "waiting_for_peers": "waiting",
    "waiting_for_network": "waiting",
    "starting": "recovering",
    "detecting": "recovering",
    "reconfiguring": "recovering",
    "replaying": "recovering",
    "standby": "spare",
    "failed": "dead",
    "finished": "finished",
}
"""What a lane shows, by `ddiloco.goodput.accounting.State`."""

HOST_KIND = {"host_here": "connected", "host_gone": "gone"}
"""What the lane of a host shows, by the event."""

SECONDS = ("quorum_seconds", "grace_seconds", "sync_seconds")  # of a round


@dataclasses.dataclass
class LearnerHistory:
    """What one learner did."""

    lane: Lane = dataclasses.field(default_factory=Lane)
    steps: int = 0
    clock: int = 0
    tokens: int = 0
    stepped_at: float | None = None
    starts: int = 0
    gaps: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=33))
    stale: collections.deque[int] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT)
    )
    not_finite: bool = False  # the newest loss
    skips: collections.deque[bool] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=RECENT_STEPS)
    )  # whether the last steps were skipped
    silent: bool = False  # the syncer has not heard of it
    hosts: dict[int, Lane] = dataclasses.field(default_factory=dict)  # of a learner of several: see HOST_KIND

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps, from end to end."""
        return statistics.median(self.gaps) if self.gaps else None

    @property
    def skipped_share(self) -> float:
        """What was skipped of the last steps."""
        return sum(self.skips) / max(1, len(self.skips))

    def standstill(self) -> float:
        """Seconds without a step after which it has hung."""
        return max(LEAST_STANDSTILL, STANDSTILL * (self.step_seconds or math.inf))

    def stood_still(self, moment: float) -> None:
        """It has taken no step until then: if that is too long, it had hung."""
        if self.stepped_at is not None and moment - self.stepped_at > self.standstill():
            self.lane.hung(self.stepped_at, moment)


class History:
    """A run's past, as its files tell it.

    `read` takes in what is new. Rounds and steps are taken in the order of their times, so that it is known
    how far a learner had come when its work was merged. Lines that cannot be read are skipped.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        self.workdir = workdir
        self._begin()

    def _begin(self) -> None:
        root = self.workdir
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.learners: dict[int, LearnerHistory] = {}
        self.fragments: dict[int, dict[str, Any]] = {}  # the newest round of each
        self.rounds: collections.deque[dict[str, Any]] = collections.deque(maxlen=RECENT)
        self.round_count = 0
        self.contributed = 0  # to all rounds, of `live` who were there
        self.live = 0
        self.sums: dict[str, float] = collections.defaultdict(float)  # over rounds, of what took seconds
        self.events: collections.deque[dict[str, Any]] = collections.deque(maxlen=SHOWN_EVENTS)
        self.slots: Slots | None = None
        self.last = -math.inf  # the latest time in any line
        self.going_on = False
        self.whole = False  # whether all that there was has been read
        self._lines = {name: LineTail(root / f"{name}.jsonl") for name in ("states", "rounds", "events")}
        self._steps: dict[int, LineTail] = {}
        self._summary_mark: tuple[int, int] | None = None

    @property
    def _in_real_time(self) -> bool:
        """Whether it goes on, by this machine's clock."""
        return self.going_on and self.config.get("driver") != "virtual"

    @property
    def now(self) -> float:
        """The time of the page: that of the last line, or of the clock while a run in real time goes on."""
        clock = time.time() if self._in_real_time else -math.inf
        return max(clock, self.last) if math.isfinite(self.last) else 0.0

    @property
    def started(self) -> float:
        """When the run began; 0 before that."""
        return self.slots.start if self.slots is not None else 0.0

    def read(self, budget: float = math.inf) -> bool:
        """Takes in what is new, for about `budget` seconds; returns whether that was all."""
        ends = time.monotonic() + budget
        try:
            self.whole = self._read(ends)
        except (Replaced, FileNotFoundError):  # another run has begun, or is about to, in the folder
            self._begin()
        return self.whole

    def _read(self, ends: float) -> bool:
        self._read_summary()
        self._find_learners()
        for tail in (*self._lines.values(), *self._steps.values()):
            tail.look()
        states, rounds, events = self._lines.values()
        if self.slots is None and math.isfinite(states.time):
            self.slots = Slots(states.time)
        while events.time < math.inf:
            self._event(events.take())
        newest = time.time() - BEHIND if self._in_real_time else LATEST
        while rounds.time <= newest:
            self._until(rounds.time)
            self._round(rounds.take())
            if self.round_count % 16 == 0 and time.monotonic() > ends:
                return False
        self._until(LATEST, ends)
        return time.monotonic() <= ends

    def _until(self, moment: float, ends: float = math.inf) -> None:
        """Takes in states up to this moment, before each all steps until then."""
        states = self._lines["states"]
        while True:
            change = min(states.time, moment)
            for number, tail in self._steps.items():
                while tail.time <= change:
                    self._step(number, tail.take())
                    if self.learners[number].steps % 256 == 0 and time.monotonic() > ends:
                        return
            if states.time > moment:
                return
            self._states_line(states.take())

    def _read_summary(self) -> None:
        """Reads summary and config again where they have changed."""
        path = self.workdir / "summary.json"
        try:
            status = path.stat()
        except OSError:
            self.going_on = False
            return
        mark = (status.st_ino, status.st_mtime_ns)
        if mark != self._summary_mark:
            self.summary, self._summary_mark = read_json(path), mark
        over = self.summary.get("finished") or self.summary.get("interrupted") or "driver" in self.summary
        self.going_on = not over and time.time() - status.st_mtime < ALIVE
        if not self.config:
            self.config = read_json(self.workdir / "config.json")
            self.environment = read_json(self.workdir / "environment.json")

    def _find_learners(self) -> None:
        folders = [path for path in self.workdir.glob("learners/*") if path.name.isdigit()]
        known = {int(path.name) for path in folders} | set(range(int(self.summary.get("num_learners") or 0)))
        for number in sorted(known - self._steps.keys()):
            self.learners.setdefault(number, LearnerHistory())
            self._steps[number] = LineTail(self.workdir / "learners" / str(number) / "steps.jsonl")

    def _seen(self, moment: float) -> Slots:
        self.last = max(self.last, moment)
        if self.slots is None:
            self.slots = Slots(moment)
        return self.slots

    def _states_line(self, line: Mapping[str, Any]) -> None:
        learner = self.learners.setdefault(int(line["learner"]), LearnerHistory())
        state = str(line.get("state"))
        self._seen(line["time"])
        if state == "failed":
            learner.stood_still(line["time"])
        # To a restarted syncer all learners seem to start, also those that step on.
        learner.starts += state == "starting" and learner.lane.state not in ("stepping", "waiting")
        learner.lane.enter(KIND.get(state, "recovering"), line["time"])
        if state != "stepping":
            learner.stepped_at = None

    def _step(self, number: int, line: Mapping[str, Any]) -> None:
        moment, tokens = line["time"], line.get("tokens", 0)
        learner, slots = self.learners[number], self._seen(moment)
        if learner.stepped_at is not None:
            learner.stood_still(moment)
            learner.gaps.append(moment - learner.stepped_at)
        learner.stepped_at = moment
        learner.steps += 1
        learner.clock, learner.tokens = max(learner.clock, line.get("step", 0)), learner.tokens + tokens
        slots.add(moment, ("tokens", number), tokens)
        slots.add(moment, "tokens", tokens)
        learner.skips.append(bool(line.get("skipped")))
        if "loss" in line:
            learner.not_finite = line["loss"] is None
        if line.get("loss") is not None:
            slots.add(moment, ("loss", number), line["loss"])
            slots.add(moment, ("losses", number))

    def _round(self, line: dict[str, Any]) -> None:
        moment, slots = line["time"], self._seen(line["time"])
        self.rounds.append(line)
        self.round_count += 1
        self.fragments[line["fragment"]] = line
        slots.add(moment, "rounds")
        slots.add(moment, "quorum", len(line.get("learners", ())))
        slots.add(moment, "live", line.get("live", 0))
        self.contributed += len(line.get("learners", ()))
        self.live += line.get("live", 0)
        for name in SECONDS:
            slots.add(moment, name, line.get(name) or 0.0)
            self.sums[name] += line.get(name) or 0.0
        for number, _, _, clock, *_ in line.get("contributions") or []:
            slots.add(moment, ("in", number))
            if number in self.learners:
                self.learners[number].stale.append(max(0, self.learners[number].clock - clock))

    def _event(self, line: dict[str, Any]) -> None:
        self._seen(line["time"])
        self.events.append(line)
        event = line.get("event")
        if event in HOST_KIND:  # it may be connected before it has any other line
            self.learners.setdefault(int(line["learner"]), LearnerHistory())
        learner = self.learners.get(line.get("learner", -1))
        if learner is None:
            return
        if event in ("learner_silent", "learner_returned", "learner_ready"):
            learner.silent = event == "learner_silent"
        elif event in HOST_KIND:
            if event == "host_here":
                hosts = set(range(int(line["hosts"])))
                for host in learner.hosts.keys() - hosts:  # it has come back with fewer
                    del learner.hosts[host]
                for host in hosts - learner.hosts.keys():
                    learner.hosts[host] = Lane()
                    learner.hosts[host].enter("gone", line["time"])
            if (lane := learner.hosts.get(int(line["host"]))) is not None:
                lane.enter(HOST_KIND[event], line["time"])


def names_of(histories: Sequence[History]) -> list[str]:
    """The runs' names: of each as many folders of its path as tell it from the others."""
    paths = [history.workdir.resolve().parts for history in histories]
    most = max(map(len, paths), default=0)
    names: list[str] = []
    for count in range(1, most + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names
