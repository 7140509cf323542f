"""The whole idea in one file and one thread: two learners and a syncer on four numbers.

  python -m experiments.minimal

Each learner pulls the numbers towards a target of its own; what is best for both lies half way between them.
The cores decide; this driver gives them a clock, arrays, and messages that arrive at once.
"""

from __future__ import annotations

import collections

import numpy as np

from ddiloco.outer.merging import Sent, contribution_weight, direct
from ddiloco.protocol import actions, events
from ddiloco.protocol.learner import LearnerCore
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.syncer import SyncerCore
from experiments.cli import program

STEPS, TOKENS, INNER_RATE, OUTER_RATE = 16, 32, 0.2, 0.9
TARGETS = np.array([[1.0, 0.0, 4.0, 2.0], [3.0, 2.0, 0.0, 2.0]])  # of learner 0 and of learner 1
HALVES = slice(0, 2), slice(2, 4)  # of the numbers: fragment 0 and fragment 1


class Run:
    """The arrays of all three, and the messages between them."""

    def __init__(self) -> None:
        policy = SyncPolicy(num_learners=2, num_fragments=2, interval=4, quorum=2)
        self.syncer, self.now = SyncerCore(policy, STEPS), 0.0
        self.learners = [LearnerCore(m, 1, policy, STEPS) for m in (0, 1)]
        self.best, self.theta = TARGETS.mean(axis=0), np.zeros(4)  # theta: the global numbers
        self.own, self.copies = np.zeros((2, 4)), {}
        self.mail = collections.deque()  # (core, event)

    def run(self) -> None:
        """Trains to the last step."""
        for learner in self.learners:
            self.send(learner, events.Heartbeat())  # makes a learner that was not welcomed yet ask to join
        while not self.syncer.finished:
            self.now += 1.0
            for m, learner in enumerate(self.learners):
                if learner.recovered and not (learner.done or learner.blocked):
                    self.own[m] += INNER_RATE * (TARGETS[m] - self.own[m])  # an inner step
                    self.send(learner, events.StepStarted(TOKENS))
                    self.send(learner, events.StepFinished())
            if (self.syncer.next_deadline() or self.now + 1) <= self.now:
                self.send(self.syncer, events.Timeout())

    def send(self, core, event) -> None:
        """Gives a core an event, and performs all actions that follow."""
        self.mail.append((core, event))
        while self.mail:
            core, event = self.mail.popleft()
            for action in core.handle(event, self.now):
                self.perform(core, action)

    def perform(self, core, action) -> None:
        """Does what a core asks for."""
        match action:
            case actions.SendToSyncer(event):
                if isinstance(event, events.StepReported):
                    print(f"learner {core.learner} reports step {event.report.step}")
                self.mail.append((self.syncer, event))
            case actions.Send(receivers, event):
                if isinstance(event, events.OfferAsked):
                    asked = " and ".join(f"learner {m}" for m, _ in receivers)
                    wanted = f"fragment {event.round.fragment} at step {event.clock}"
                    print(f"  asked ahead: {asked}, for {wanted}")
                self.mail.extend((self.learners[m], action.to(m)) for m, _ in receivers)
            case actions.AdoptAll():
                print(f"learner {core.learner} is welcomed, and begins with the global numbers")
                self.own[core.learner] = self.theta
            case actions.MakeOffer(c):
                self.copies[c] = self.own[c.learner][HALVES[c.fragment]].copy()
            case actions.SendOffer(round, c):
                print(f"  learner {c.learner} offers fragment {c.fragment} at step {c.step}")
                self.mail.append((self.syncer, events.FragmentArrived(round, c)))
            case actions.Merge(round, version, contributions):
                self.merge(HALVES[round.fragment], contributions)
                text = f"version {version} of fragment {round.fragment}, {len(contributions)} learners in it"
                distance = np.linalg.norm(self.theta - self.best)
                print(f"  merged and broadcast: {text}; distance to the best {distance:.3f}")
                self.mail.append((self.syncer, events.MergeFinished(round)))
            case actions.ApplyUpdate(fragment, version):
                self.own[core.learner][HALVES[fragment]] = self.theta[HALVES[fragment]]
                print(f"  learner {core.learner} applies version {version} of fragment {fragment}")

    def merge(self, half: slice, contributions) -> None:
        """The outer step, on one fragment."""
        gradients = [self.theta[half] - self.copies[c] for c in contributions]  # outer gradients
        weights = np.array([contribution_weight(c.steps, c.tokens) for c in contributions])
        self.theta[half] -= OUTER_RATE * np.asarray(direct(Sent(gradients, weights)).value)


if __name__ == "__main__":
    program.run(lambda _: Run().run())
