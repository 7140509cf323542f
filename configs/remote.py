"""The section `config.remote`: the wire and the processes on it, for learners and syncer as processes.

Configs take it as

  config.remote = remote.section()
"""

from ml_collections import ConfigDict


def section() -> ConfigDict:
    """A network that is well; times in seconds."""
    c = ConfigDict()
    c.keepalive = 20.0  # without a sign of the other end until it is asked for one, and again to answer
    c.handshake = 20.0  # that joining may take
    c.longest_backoff = 15.0  # between two tries to reach the syncer, or to restart a process
    c.gather = 30.0  # from the first learner's join that the syncer waits for the others to begin
    c.connections = 1  # of a learner for fragments each way; more on long fat networks
    c.donor_host = "127.0.0.1"  # at which learners give each other inner optimizer states; "": they do not
    c.donation_timeout = 30.0  # that a joining learner waits for a peer's inner optimizer state
    c.checkpoint_every = 60.0  # between a learner's own copies of its inner optimizer state; 0: none
    c.spares = 0  # compiled processes that driver=remote keeps ready to take a dead learner's place
    c.restarts = 20  # times that driver=remote restarts one process
    return c
