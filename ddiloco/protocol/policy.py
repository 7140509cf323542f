"""The settings of synchronisation: quorum, waits and timeouts, and the run-ahead of learners."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddiloco.protocol.schedule import Schedule

TIMEOUT_SLACK = 4.0
"""Timeout slack: factor on the transfer time predicted from earlier transfers of as many bytes."""

MAX_AGE = 8
"""With rebase, maximum age in versions of a learner's oldest unmerged work on a fragment; older work is
overwritten. It covers round trips of two intervals and links of a quarter of the need. Of 2, 4 and 8, the
last two trained alike, and 8 merged more (docs/results/merged_share.md)."""

TOO_OLD = f"unmerged work older than {MAX_AGE} versions"
"""Reason of the drop of such work."""

TIMING = ("interval", "overlap", "quorum", "gamma", "max_grace")
"""The settings that may change during a run, where no learner waits for merges."""


def _knob(default: Any, meaning: str, **metadata: float | str | tuple[str, ...]) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, **metadata})


@dataclasses.dataclass(frozen=True)
class SyncPolicy:
    """Covers DiLoCo, Streaming DiLoCo and Decoupled DiLoCo; the symbols are the paper's.

    | preset    | num_fragments | quorum | max_run_ahead | grace |
    |-----------|---------------|--------|---------------|-------|
    | diloco    | 1             | None   | 0             | none  |
    | streaming | > 1           | None   | tau           | none  |
    | decoupled | > 1           | < M    | None          | > 0   |
    """

    num_learners: int = _knob(4, "M: learners that the run starts with", at_least=1)
    num_fragments: int = _knob(
        24,
        "P: parts in which the parameters are synchronised",
        at_least=1,
        may_change="never",
        because="versions and outer states are of those fragments",
    )
    interval: int = _knob(24, "H: inner steps between two rounds of one fragment", at_least=1)
    overlap: int = _knob(
        2, "tau: inner steps that a round may overlap; most rounds that wait for a merge", at_least=0
    )
    quorum: int | None = _knob(1, "K: learners that a merge needs at least; None: all live ones", at_least=1)
    gamma: float = _knob(0.8, "share of the slack that a grace window may use", at_least=0.0, below=1.0)
    max_grace: float = _knob(1.0, "longest grace window of the paper's rule, in inner steps", at_least=0.0)
    grace: str = _knob(
        "expected",
        "how long a merge waits after its quorum. expected: also for offers predicted to arrive before "
        "the fragment's next round, where no learner waits for merges; paper: the paper's window alone",
        choices=("expected", "paper"),
    )
    mixing: float = _knob(
        0.0,
        "alpha: share of its own value that a learner keeps when an update arrives",
        at_least=0.0,
        at_most=1.0,
    )
    rebase: bool = _knob(
        False, "whether a learner keeps what it did between its offer and the update that contains it"
    )
    max_run_ahead: int | None = _knob(
        None, "inner steps that a learner may take past an update that it lacks; None: no bound", at_least=0
    )
    offer_timeout: float = _knob(
        60.0,
        "seconds after which a reported offer is dropped, and asked for again; longer where "
        "welcomes are slow",
        above=0.0,
    )
    silence_timeout: float = _knob(
        60.0, "seconds without a message after which a learner is not live", above=0.0
    )
    resend_timeout: float = _knob(
        30.0, "seconds after which an update that no report confirms is sent again", above=0.0
    )

    def __post_init__(self) -> None:
        if self.rebase and self.mixing:
            raise ValueError(f"mixing: is {self.mixing}, but must be 0 with rebase, which keeps own work too")
        if self.max_run_ahead is not None and self.max_run_ahead >= self.interval:
            raise ValueError(
                f"max_run_ahead: is {self.max_run_ahead}, but must be below interval, {self.interval}: "
                "a fragment is due again by then, so the bound would never bind"
            )
        if self.quorum is not None and self.quorum > self.num_learners:
            raise ValueError(
                f"quorum: is {self.quorum}, but must be at most num_learners, {self.num_learners}"
            )
        if self.max_run_ahead is not None and self.quorum is not None:
            raise ValueError(
                "max_run_ahead: is bounded, so quorum must be None (all live learners); "
                f"with a quorum of {self.quorum} the learners would wait forever once fewer are live"
            )

    def schedule(self, last: int | None) -> Schedule:
        """When fragments are due in a run of so many steps; None: it has no end."""
        return Schedule(self.num_fragments, self.interval, last)

    @property
    def min_quorum(self) -> int:
        """Minimum number of learners in a merge."""
        return self.quorum or 1

    @property
    def waits_for_expected(self) -> bool:
        """Whether merges wait for expected offers: only where no learner waits for merges."""
        return self.grace == "expected" and self.quorum is not None and self.max_run_ahead is None

    @property
    def takes_late_work(self) -> bool:
        """Whether an offer that missed its round is merged in a later one."""
        return self.rebase and self.max_run_ahead is None

    @property
    def band(self) -> int:
        """Steps that a learner may lag behind an update without its clock being set forward."""
        return 0 if self.quorum is None else self.interval // 2

    @property
    def heartbeat(self) -> float:
        """Seconds after which a learner repeats its report as a heartbeat."""
        return self.silence_timeout / 4
