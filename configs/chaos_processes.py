"""Real processes that really die: four learners and a syncer, and a seeded killer beside them.

  python -m experiments.chaos --config=configs/chaos_processes.py[:PRESET] --workdir=DIR [--undisturbed]

PRESET
  default    10 minutes, about 210 kills, and some hangs and partitions
  short      2 minutes
  quick      about 45 s, a few faults; what the tests run
  hostile    as the default, with two hostile peers all the while, of which one is learner 4

`--config.any.field=value` overrides what the processes are given, `--chaos.field=value` what befalls them.
Steps are slowed down, so that on 2 cores there is time left for the processes that start again.
"""

from ml_collections import ConfigDict

from configs import dense, sections
from experiments.studies.chaos.processes import ProcessChaos

SECONDS = {"default": 570.0, "short": 100.0, "quick": 16.0, "hostile": 570.0}  # for which faults come
STEP_SECONDS = 0.2


def get_config(preset: str = "default") -> ConfigDict:
    """The settings of the run: a tiny model, 0.15M parameters, and as many steps as the faults need."""
    chaos = get_chaos(preset)
    config = dense.begin("tiny,paper")
    config.driver = "remote"
    config.model.num_layers, config.model.model_dim, config.model.mlp_dim = 2, 64, 176
    config.train.batch_size = 4
    if chaos.hostile:
        config.sync.num_learners = 5
    calm = 14.0 if preset == "quick" else 20.0  # after the last fault, for the dead to come back
    seconds = chaos.steady_seconds + chaos.seconds + calm
    config.train.steps = round(seconds / STEP_SECONDS)  # T
    config.train.min_step_seconds = (STEP_SECONDS,) * config.sync.num_learners
    config.sync.offer_timeout, config.sync.silence_timeout, config.sync.resend_timeout = 2.0, 3.0, 2.0
    config.remote.restarts = 100_000  # times that one process is started again
    config.remote.longest_backoff = 0.5  # seconds until it is, and between two tries to connect
    config.remote.spares = 0 if preset == "quick" else 2  # processes that take a dead learner's place
    config.remote.keepalive = 2.0  # seconds without a sign, until a partition is noticed
    config.eval.every = 0
    config.sample.tokens = 0
    return config


def get_chaos(preset: str = "default") -> ConfigDict:
    """What befalls the processes."""
    (preset,) = sections.words(preset, tuple(SECONDS))
    quick, long = preset == "quick", preset in ("default", "hostile")
    c = sections.section(ProcessChaos)
    c.seed = {"short": 2, "quick": 40}.get(preset, 0)  # the short ones have every kind of fault
    if quick:
        c.steady_seconds = 5.0
    c.seconds = SECONDS[preset]
    c.learner_every = {"short": 20.0, "quick": 12.0}.get(preset, 9.6)
    c.syncer_every = {"short": 40.0, "quick": 14.0}.get(preset, 28.0)
    if not long:
        c.hang_share = c.partition_share = 0.2  # few faults, of every kind
    if quick:
        c.hang_seconds = c.partition_seconds = 2.0
    c.hostile = preset == "hostile"
    return c
