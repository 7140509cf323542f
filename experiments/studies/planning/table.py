"""A plan as text, and as JSON for the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ddiloco.settings.experiment import Experiment
from ddiloco.telemetry.loss_estimate import ERROR
from experiments.cli.tables import markdown
from experiments.studies.planning.choices import Played, best
from experiments.studies.planning.worth import Worth

COLUMNS = ("choice", "merged", "worst learner", "work", "age", "skipped", "bytes a token", "loss")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices played on a run's fleet, the run's own first.

    Attributes:
      recorded: the run itself, to judge the method by; None: it is a virtual one, which the play repeats.
    """

    experiment: Experiment
    played: Sequence[Played]
    recorded: Played | None
    worth: Sequence[Worth]

    @property
    def best(self) -> Played:
        """The choice to take."""
        return best(self.played)

    @property
    def gain(self) -> float:
        """Percent of the loss by which the best choice is better than the run's own."""
        return self.played[0].loss - self.best.loss

    @property
    def flags(self) -> list[str]:
        """Those that a restart needs to take the best choice."""
        own, other = self.played[0].choice.flags, self.best.choice.flags
        return [f"--config.{path}={value}" for path, value in other.items() if value != own[path]]

    @property
    def text(self) -> str:
        """The table, the advice, and what conspicuous learners are worth."""
        rows = [self._row(self._named(one), one) for one in self.played]
        if self.recorded is not None:
            rows.insert(0, self._row("the run, recorded", self.recorded))
        lines = [markdown(COLUMNS, rows, align=True), self._advice()]
        for one in self.worth:
            lines += [*one.lines, f"  {one.verdict}"]
        return "\n".join(lines)

    @property
    def values(self) -> dict[str, Any]:
        """For JSON: all figures, the flags and the sentence."""
        return {
            "advice": self._advice(),
            "gain": self.gain,
            "error": ERROR,
            "flags": self.flags,
            "settings": self.best.choice.settings,
            "choices": [
                {"settings": one.choice.settings, "loss": one.loss, **dataclasses.asdict(one.outcome)}
                for one in self.played
            ],
            "learners": {one.learner: [*one.lines, one.verdict] for one in self.worth},
        }

    def _named(self, one: Played) -> str:
        c = one.choice
        mark = " *" if one is self.best else ""
        own = " (now)" if one is self.played[0] else ""
        return f"H={c.interval} {','.join(c.codecs)} K={c.quorum or 'all'} tau={c.overlap}{own}{mark}"

    def _row(self, name: str, one: Played) -> list[str]:
        o = one.outcome
        return [
            name,
            f"{o.share:.0%}",
            f"{o.worst:.0%}",
            f"{o.work:.1f}",
            f"{o.age:.1f}",
            f"{o.skipped}",
            f"{o.bytes_sent:.3g}",
            f"{one.loss - self.played[0].loss:+.1f}%",
        ]

    def _advice(self) -> str:
        if not self.flags:
            return "no choice is better than the run's own by more than the estimate can tell"
        sure = "likely" if self.gain > ERROR else "unsure"
        loss = f"estimated loss {-self.gain:+.1f}% (give or take {ERROR:.1f}, {sure})"
        settings = [flag.removeprefix("--config.") for flag in self.flags]
        timing = all(setting.startswith("sync.") for setting in settings)
        during = f", or experiments.control set {' '.join(settings)} while it runs" if timing else ""
        return f"restart with {' '.join(self.flags)}{during}: {loss}"
