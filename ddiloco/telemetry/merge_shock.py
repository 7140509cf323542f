"""How the loss of learners changes at their updates: the first batch after one against the last before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

MIN_UPDATES = 16
"""Updates of all learners before anything is reported: single batches differ by more than a merge does."""


@dataclasses.dataclass
class MergeShock:
    """Sums over the updates of one learner, from the losses of its steps in their order.

    An update is *made up* at the first step whose loss is no higher than that of the step before the update.
    It is *kept* if the next update comes before that.
    """

    updates: int = 0  # with a loss before and after
    others: int = 0  # pairs of successive steps without an update between them
    total: float = 0.0  # of the changes at updates, nats per token
    squares: float = 0.0
    made_up: int = 0
    made_up_steps: int = 0  # until then, of all of these
    kept: int = 0
    _last: float = math.nan  # loss of the step before
    _before: float | None = None  # loss before the newest update, until that is made up
    _since: int = 0  # steps since that update

    def add(self, loss: float, updated: bool) -> None:
        """Adds a step; `updated`: whether an update was applied since the step before.

        A loss that is not finite, as of a skipped step, ends what can be compared.
        """
        if updated:
            self.kept += self._before is not None
            self._before, self._since = None, 0
        change, self._last = loss - self._last, loss
        if not math.isfinite(loss):
            self._before = None
        elif math.isfinite(change) and updated:
            self.updates += 1
            self.total += change
            self.squares += change * change
            self._before = loss - change
        else:
            self.others += math.isfinite(change)
        if self._before is not None:
            self._since += 1
            if loss <= self._before:
                self.made_up += 1
                self.made_up_steps += self._since
                self._before = None


def merge_shock(learners: Iterable[MergeShock]) -> dict[str, float | None]:
    """The figures of all learners together, as in `summary.json`; None: unknown.

    `merge_shock`: mean change of the loss at an update, nats per token, with its standard error;
    `merge_shock_steps`: mean steps until one is made up, of those that are; `merge_shock_kept`: share of
    those that are kept. Unknown where most steps follow an update: the loss before one then has another's.
    """
    known = list(learners)

    def of_all(name: str) -> float:
        return sum(getattr(one, name) for one in known)

    count, ended = of_all("updates"), of_all("kept") + of_all("made_up")
    names = ("merge_shock", "merge_shock_error", "merge_shock_steps", "merge_shock_kept")
    if count < MIN_UPDATES or 2 * of_all("others") < count or not ended:
        return dict.fromkeys(names)
    mean = of_all("total") / count
    variance = max(0.0, of_all("squares") / count - mean * mean)
    steps = of_all("made_up_steps") / of_all("made_up") if of_all("made_up") else None
    return dict(zip(names, (mean, math.sqrt(variance / count), steps, of_all("kept") / ended), strict=True))
