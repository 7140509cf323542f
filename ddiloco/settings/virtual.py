"""The settings of a virtual fleet: its learners' hardware, links and failures, in virtual seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ddiloco.config import section, setting
from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.spare_capacity import SpareCapacity

AVAILABILITY = ("steady", "trace", "failures", "spare_capacity")
BY_LEARNER = ("step_seconds", "latency", "bandwidth", "jitter", "loss")


@dataclasses.dataclass(frozen=True)
class VirtualConfig:
    """The simulated hardware. Tuples have one entry for each learner, or one for all."""

    step_seconds: tuple[float, ...] = setting(
        (1.0,), "seconds of a step on all chips of a learner", above=0.0
    )
    speed_variation: float = setting(
        0.0,
        "relative standard deviation of the step time between learners; sampled once",
        at_least=0.0,
        at_most=1.0,
    )
    step_variation: float = setting(
        0.0, "the same between the steps of one learner; sampled for each step", at_least=0.0, at_most=1.0
    )
    latency: tuple[float, ...] = setting((0.0,), "seconds from learner to syncer or back", at_least=0.0)
    bandwidth: tuple[float, ...] = setting((), "bytes a second of a link, each way; (): no bound", above=0.0)
    jitter: tuple[float, ...] = setting(
        (0.0,), "mean seconds of an additional, exponential delay; it can reorder messages", at_least=0.0
    )
    loss: tuple[float, ...] = setting((0.0,), "share of messages that are lost", at_least=0.0, below=1.0)
    seconds: float | None = setting(
        None, "budget of virtual time, which sets train.steps; None: by tokens or steps", above=0.0
    )
    merge_seconds: float = setting(0.0, "seconds of a merge; merges run one after the other", at_least=0.0)
    notice_seconds: float = setting(10.0, "seconds until the syncer detects a dead learner", at_least=0.0)
    recovery_seconds: float = setting(
        30.0, "seconds from the start of a learner's process until it joins", at_least=0.0
    )
    resize_seconds: float = setting(
        30.0, "seconds that elastic data-parallel pauses when chips are added or removed", at_least=0.0
    )
    arrays: bool = setting(True, "whether to train; False: only the protocol, its times and its goodput")
    num_chips: int | None = setting(
        None, "chips of all learners, divided evenly; None: one a learner", at_least=1
    )
    availability: str = setting(
        "steady", "model of learners' failures, leaves and joins", choices=AVAILABILITY
    )
    trace: str | None = setting(None, "CSV file of (time, learner, event), for availability=trace")
    failures: FailureModel = section(FailureModel)
    spare_capacity: SpareCapacity = section(SpareCapacity)

    def problems(self, num_learners: int) -> Iterator[str]:
        """Settings that contradict each other or the learners, each in a line that begins with the field."""
        if (self.availability == "trace") is (self.trace is None):
            wanted = "must name a file" if self.trace is None else "needs availability to be trace"
            yield f"trace: is {self.trace}, but {wanted}; availability is {self.availability}"
        for name in BY_LEARNER:
            count = len(getattr(self, name))
            if count not in (1, num_learners) and (count or name != "bandwidth"):
                yield f"{name}: has {count} entries, but must have 1, or {num_learners}, one a learner"
        if self.num_chips is not None and self.num_chips < num_learners:
            yield f"num_chips: is {self.num_chips}, but must be at least {num_learners}: one a learner"

    def chips(self, num_learners: int) -> int:
        """Chips of the whole fleet."""
        return num_learners if self.num_chips is None else self.num_chips

    def of(self, name: str, learner: int) -> float:
        """The learner's entry of a tuple."""
        entries = getattr(self, name)
        return entries[learner] if len(entries) > 1 else entries[0]
