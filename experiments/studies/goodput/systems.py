"""The systems that are compared: `data_parallel`, `elastic_data_parallel`, `decoupled:M`; in closed forms.

Symbols: lambda, a job's interruptions a second; d, the pause that one costs (detection, downscale, half a
step to do again); u, an upscale; W, the wait for one. While a job steps, slices return about as often as
they fail. An upscale comes only if no interruption comes within W of the first return, with q = exp(-lambda
W), for those are taken in by the pause of the interruption: q / (2 - q) upscales an interruption. So for an
elastic job

    1 / g - 1 = lambda (d + u q / (2 - q)),

and of its chips a share is away. A job without elasticity is a renewal process: with its whole pause R
(detection, restart, half a step) and the share s of spares, g = (1 - s) / (1 + lambda R).
"""

from __future__ import annotations

import dataclasses
import math
import re

from ddiloco.goodput.failures import FailureModel

CHIPS = (150_000, 300_000, 1_200_000)
GOODPUT_PERCENT: dict[str, tuple[int, ...]] = {  # the paper's, at one year between interruptions of a chip
    "data_parallel": (72, 57, 27),
    "elastic_data_parallel": (88, 80, 58),
    "decoupled:2": (94, 88, 70),
    "decoupled:4": (96, 93, 82),
    "decoupled:8": (98, 96, 88),
    "decoupled:16": (99, 98, 93),
}


def published(system: str, num_chips: int) -> int | None:
    """The paper's goodput (percent) of a system of that name; None: its table has no such cell."""
    cells = dict(zip(CHIPS, GOODPUT_PERCENT.get(system, ()), strict=False))
    return cells.get(num_chips)


@dataclasses.dataclass(frozen=True)
class System:
    """How a fleet is used: by one job, or by M learners that do not wait for each other."""

    name: str  # data_parallel, elastic_data_parallel or decoupled
    num_learners: int = 1

    @property
    def elastic(self) -> bool:
        """Whether a job continues without a lost slice."""
        return self.name != "data_parallel"

    @property
    def label(self) -> str:
        """The name that `system_of` reads."""
        return self.name if self.name != "decoupled" else f"decoupled:{self.num_learners}"

    def analytic_goodput(self, model: FailureModel, num_chips: int) -> float | None:
        """Goodput in closed form; None for chips of several speeds."""
        if model.chip_speed_variation:
            return None
        goodput = elastic_goodput if self.elastic else inelastic_goodput
        return goodput(model, num_chips / self.num_learners)


def system_of(label: str) -> System:
    """The system of that name; raises ValueError if there is none."""
    if label in ("data_parallel", "elastic_data_parallel"):
        return System(label)
    learners = re.fullmatch(r"decoupled:([1-9][0-9]*)", label)
    if learners is None:
        raise ValueError(f"is {label!r}, but must be data_parallel, elastic_data_parallel or decoupled:M")
    return System("decoupled", int(learners[1]))


def elastic_goodput(model: FailureModel, chips: float) -> float:
    """Goodput of an elastic job, as a share; of a system of M learners each alike: pass a learner's chips.

    Meant for jobs of many slices: that the last slice may be lost is not in it. Nor are chips' speeds.
    """
    rate, present = chips / model.mtbi_seconds, 1.0
    for _ in range(50):  # what is away fails no more, and how long it is away depends on the rate
        struck = rate * present
        none_comes = math.exp(-struck * model.upscale_wait_seconds)
        wait = (1.0 - none_comes) / struck  # for an upscale or an interruption, whichever is first
        away = model.return_seconds + wait
        present = 1.0 / (1.0 + model.chips_per_slice / model.mtbi_seconds * away)
    pause = model.detection_seconds + model.downscale_seconds + model.step_seconds / 2.0
    lost = struck * (pause + model.upscale_seconds * none_comes / (2.0 - none_comes))
    return present / (1.0 + lost)


def inelastic_goodput(model: FailureModel, chips: float) -> float:
    """Goodput of a job without elasticity, as a share, on this number of chips, spares included."""
    rate = (1.0 - model.spare_share) * chips / model.mtbi_seconds
    pause = model.detection_seconds + model.restart_seconds + model.step_seconds / 2.0
    return (1.0 - model.spare_share) / (1.0 + rate * pause)
