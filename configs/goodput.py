"""Goodput, uptime and lost time of systems of many chips, simulated.

  python -m experiments.simulate --output=FILE.json [--config.any.field=value]
  python -m experiments.simulate --config.num_chips=600000,900000 --config.systems=decoupled:3

The default grid takes about 25 seconds on one CPU core. Expected: data_parallel falls from 72% at 150k
chips to 27% at 1.2M, decoupled:8 from 98% to 88% (docs/results/goodput.md). The failure model's values
stand in ddiloco/goodput/failures.py; `python -m experiments.calibrate` says where they come from.
"""

from ml_collections import ConfigDict, config_dict

from ddiloco.goodput.failures import FailureModel


def get_config() -> ConfigDict:
    """The grid and the failure model."""
    config = ConfigDict()
    config.num_chips = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)  # of a whole system
    config.systems = (
        "data_parallel",  # without elasticity: any failure stops all, spares are kept
        "elastic_data_parallel",  # goes on without the slices that it lost
        "decoupled:2",  # M learners, each an elastic job of its own
        "decoupled:4",
        "decoupled:8",
        "decoupled:16",
    )
    config.days = 30.0  # simulated time
    config.seeds = 5  # repetitions, of seeds 0, 1 and so on
    config.quorum = config_dict.placeholder(int)  # K: also tell when K learners step at least; None: do not
    config.failures = failures(FailureModel())
    return config


def failures(default: FailureModel) -> ConfigDict:
    """How often chips are interrupted, and what it costs."""
    c = ConfigDict()
    c.mtbi_years = default.mtbi_years  # years between two interruptions of one chip
    c.weibull_shape = default.weibull_shape  # 1: exponential times; below 1: a new fleet fails more often
    c.chips_per_slice = default.chips_per_slice  # chips that an interruption takes away
    c.detection_seconds = default.detection_seconds  # s, until a job knows why it stands still
    c.downscale_seconds = default.downscale_seconds  # s, to go on without the slices that were lost
    c.upscale_seconds = default.upscale_seconds  # s, to take returned slices in
    c.upscale_wait_seconds = default.upscale_wait_seconds  # s, from the first return until an upscale begins
    c.return_seconds = default.return_seconds  # s, until a lost slice is back, on average
    c.return_shape = default.return_shape  # of their Weibull distribution; 1: exponential
    c.restart_seconds = default.restart_seconds  # s, to start a whole job again
    c.spare_share = default.spare_share  # of the slices, kept as spares without elasticity
    c.step_seconds = default.step_seconds  # s, of one step; what is lost of it is done again
    c.chip_speed_variation = (
        default.chip_speed_variation
    )  # standard deviation of step times over chips, in steps
    return c
