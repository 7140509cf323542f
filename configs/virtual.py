"""The section `config.virtual`: hardware, links and lives that `--config.driver=virtual` plays.

Times are virtual seconds. A tuple has an entry for each learner, or one for all. Configs take it as

  config.virtual = virtual.section()
"""

from ml_collections import ConfigDict, config_dict

from configs import goodput
from ddiloco.goodput.failures import FailureModel


def section() -> ConfigDict:
    """A steady fleet: a second a step, links that take no time."""
    c = ConfigDict()
    c.step_seconds = (1.0,)  # of a step on all of a learner's chips
    c.speed_variation = 0.0  # standard deviation between learners, as a share; drawn once
    c.step_variation = 0.0  # the same between the steps of one learner; drawn for each
    c.latency = (0.0,)  # from learner to syncer or back
    c.bandwidth = ()  # bytes a second of a link, each way; (): no bound
    c.jitter = (0.0,)  # mean of a further, exponential delay; it can reorder messages
    c.loss = (0.0,)  # share of messages that vanish
    c.seconds = config_dict.placeholder(float)  # time budget, which sets T; None: T by tokens or steps
    c.merge_seconds = 0.0  # that a merge takes
    c.notice_seconds = 10.0  # until the syncer hears of a dead learner
    c.recovery_seconds = 30.0  # from the start of a learner that comes or returns until it asks to join
    c.resize_seconds = 30.0  # that elastic data-parallel stands still when chips come or go
    c.arrays = True  # train; False: only the protocol, its times and its goodput
    c.num_chips = 8  # of the whole fleet, divided evenly among the learners

    c.lives = "steady"  # or failures, spare_capacity (both drawn from config.seed), trace
    c.trace = config_dict.placeholder(str)  # CSV or JSON: time, learner, event[, share]; for lives=trace

    c.failures = goodput.failures(FailureModel())  # of chips, and what they cost

    c.spare_capacity = ConfigDict()  # that learners scavenge; base fleet: the learners that stay
    c.spare_capacity.extra_learners = 0  # the last of config.sync.num_learners; they come and go
    c.spare_capacity.free_share = 0.58  # of the time there is any
    c.spare_capacity.mean_size = 1.5  # of what there then is, in base fleets
    c.spare_capacity.dwell_seconds = 600.0  # mean time until it is another
    return c
