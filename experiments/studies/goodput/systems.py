"""The systems that are compared, by name: `data_parallel`, `elastic_data_parallel`, `decoupled:M`."""

from __future__ import annotations

import dataclasses
import re

from ddiloco.goodput.failures import FailureModel
from experiments.studies.goodput.analytic import elastic_goodput, inelastic_goodput


@dataclasses.dataclass(frozen=True)
class System:
    """How a fleet is used: by one job, or by M learners that wait for nobody."""

    name: str  # data_parallel, elastic_data_parallel or decoupled
    num_learners: int = 1

    @property
    def elastic(self) -> bool:
        """Whether a job goes on without a slice that it lost."""
        return self.name != "data_parallel"

    @property
    def label(self) -> str:
        """The name that `system_of` reads."""
        return self.name if self.name != "decoupled" else f"decoupled:{self.num_learners}"

    def analytic_goodput(self, model: FailureModel, num_chips: int) -> float | None:
        """Goodput in closed form; None where there is none: a hazard with memory, chips of several speeds."""
        if model.weibull_shape != 1.0 or model.chip_speed_variation:
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
