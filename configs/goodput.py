"""Goodput, uptime and lost time of systems of many chips, simulated.

  python -m experiments.simulate --output=FILE.json [--config.any.field=value]
  python -m experiments.simulate --config.num_chips=600000,900000 --config.systems=decoupled:3,data_parallel

The default grid takes about 25 seconds on one CPU core. Expected: data_parallel falls from 71% at 150k
chips to 27% at 1.2M, decoupled:8 from 98% to 88% (docs/results/goodput.md). The failure model's values
stand in ddiloco/goodput/failures.py; `python -m experiments.calibrate` says where they come from.
"""

from ml_collections import ConfigDict

from configs import sections
from experiments.studies.goodput.simulator import Simulation


def get_config() -> ConfigDict:
    """The grid and the failure model."""
    config = sections.section(Simulation)
    config.num_chips = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)  # of a whole system
    config.systems = (
        "data_parallel",  # without elasticity: any failure stops all, spares are kept
        "elastic_data_parallel",  # goes on without the slices that it lost
        "decoupled:2",  # M learners, each an elastic job of its own
        "decoupled:4",
        "decoupled:8",
        "decoupled:16",
    )
    return config
