"""Mistakes in who merges when, and with whom."""

from tests.mutation.mutant import Mutant

PROTOCOL = ("tests/protocol", "schedules/test_liveness.py", "schedules/test_random_schedule.py")

MUTANTS = (
    # Schedule and clocks.
    Mutant(
        "schedule: the offset of a fragment is rounded up",
        "return fragment * self.interval // self.num_fragments",
        "return -(-fragment * self.interval // self.num_fragments)",
        PROTOCOL,
    ),
    Mutant(
        "schedule: fragments are due at step 0",
        "return self._due_after.get(step % self.interval, ()) if step >= 1 else ()",
        "return self._due_after.get(step % self.interval, ())",
        PROTOCOL,
    ),
    Mutant(
        "schedule: the last due step is off by one",
        "return max(0, step - (step - self.offset(fragment)) % self.interval)",
        "return max(0, step - 1 - (step - 1 - self.offset(fragment)) % self.interval)",
        PROTOCOL,
    ),
    Mutant(
        "estimates: slack leaves out the time that a merge takes",
        "return overlap * step_time - (quorum_time + sync_time)",
        "return overlap * step_time - quorum_time",
        PROTOCOL,
    ),
    Mutant(
        "estimates: the grace window has no upper bound",
        "return min(max(gamma * slack_seconds, 0.0), longest)",
        "return max(gamma * slack_seconds, 0.0)",
        PROTOCOL,
    ),
    # Who takes part.
    Mutant(
        "attendance: an older incarnation joins as if it were new",
        "if old is not None and incarnation < old.incarnation:",
        "if old is not None and incarnation < old.incarnation - 1:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a departed incarnation is not told that it is no member",
        "if old.state is not State.GONE and event.versions is not None:",
        "if event.versions is not None:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: silence begins one instant late",
        "while (m := self._quietest()) is not None and now >= m.heard_at + self.policy.silence_timeout:",
        "while (m := self._quietest()) is not None and now > m.heard_at + self.policy.silence_timeout:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: an update that was lost is never sent again",
        "elif now >= sent_at + self._resend_timeout:",
        "elif now < sent_at:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a learner may claim a version that was never made",
        "return all(0 <= version <= self.merged.versions[p] for p",
        "return all(0 <= version <= self.merged.versions[p] + 1 for p",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a step past the last one is believed",
        "past_the_end = self._total_steps is not None and step > self._total_steps",
        "past_the_end = self._total_steps is not None and step > self._total_steps + 1",
        PROTOCOL,
    ),
    Mutant(
        "attendance: an older report of the same step is taken",
        "if report.step < m.step or (report.step == m.step and m.knows_better(report)):",
        "if report.step < m.step:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a joiner gets updates before it has recovered",
        "receivers = [m for m in self.members.present() if m.state is not State.JOINING]",
        "receivers = self.members.present()",
        PROTOCOL,
    ),
    Mutant(
        "membership: the pause of a silent learner counts as a step's time",
        "m.reported_at = None  # the pause is no step time",
        "pass",
        PROTOCOL,
    ),
    # Rounds.
    Mutant(
        "rounds: a quorum of K needs K - 1 learners",
        "if r.counted < self._quorum or",
        "if r.counted < max(1, self._quorum - 1) or",
        PROTOCOL,
    ),
    Mutant(
        "rounds: where all must give, the first that is back after all were lost merges alone",
        "self.awaits_learners |= self._members.count == 1",
        "self.awaits_learners |= False",
        PROTOCOL,
    ),
    Mutant(
        "rounds: where all break off together, what is here is merged alone",
        "self.awaits_learners, self.waits_until = True,",
        "self.awaits_learners, self.waits_until = False,",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a window ends early though one that owed an offer may be back in it",
        "owing = self.owed.keys() | self.left_owing",
        "owing = self.owed.keys()",
        PROTOCOL,
    ),
    Mutant(
        "rounds: where all must give, who came back and has yet to report is not waited for",
        "return not r.has_given(m.learner) and (may or not m.counters)",
        "return not r.has_given(m.learner) and may",
        PROTOCOL,
    ),
    Mutant(
        "rounds: where all must give, a report without a step moves no round",
        "moves = self.policy.quorum is None or m.step",
        "moves = m.step",
        PROTOCOL,
    ),
    Mutant(
        "rounds: offers alone make a quorum, before learners have come to the step",
        "return self._members.come_to(r.id.step) + departed >= self._quorum",
        "return True",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a merge begins with too few, once offers have grown old",
        "        if not self._prospects.has_quorum(r, self._asking.front.step):\n"
        "            r.phase = Phase.GATHERING\n            return []\n",
        "",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer that a long wait has made old counts in a quorum",
        "and since > max(1, steps, offer.steps // 2)",
        "and since > 10**9",
        PROTOCOL,
    ),
    Mutant(
        "rounds: work on an older version is merged",
        "or (c.version < newest and not self.policy.takes_late_work)",
        "or False",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a contribution of no steps is merged",
        "or c.steps < 1 or",
        "or c.steps < 0 or",
        PROTOCOL,
    ),
    Mutant(
        "rounds: claims are not checked against reports",
        "if problem is None and not m.can_have(c, self.policy):",
        "if False:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer that nobody asked for is taken",
        "asked = c.fragment in m.asked if late else (c.learner, c.incarnation) in r.asked",
        "asked = True",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer of one that is silent is taken",
        "return asked and m.state is State.LIVE and r.phase is not Phase.MERGING and r.lacks(c)",
        "return asked and r.phase is not Phase.MERGING and r.lacks(c)",
        PROTOCOL,
    ),
    Mutant(
        "rounds: one more merge at once than the overlap allows",
        "for other in self._open.values()) >= max(1, self.policy.overlap):",
        "for other in self._open.values()) > max(1, self.policy.overlap):",
        PROTOCOL,
    ),
    Mutant(
        "rounds: another is asked for while as many as the overlap allows wait for their merges",
        "elif sum(r.phase in busy for r in self._open.values()) < most:",
        "elif sum(r.phase in busy for r in self._open.values()) <= most:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer is given up one instant late",
        "while (first := self.next(rounds)) is not None and now >= first:",
        "while (first := self.next(rounds)) is not None and now > first:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: the grace window does not end when all are in",
        "return self.window_closes if owing or awaits_learners else 0.0",
        "return self.window_closes",
        PROTOCOL,
    ),
    Mutant(
        "rounds: the grace window never ends while an offer is owed",
        "if now >= self._windows[r.id.fragment]:",
        "if not r.owed:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: those that wait count among the tau that merge",
        "busy = (Phase.READY, Phase.MERGING) if self.policy.waits_for_expected else tuple(Phase)[1:]",
        "busy = tuple(Phase)[1:]",
        PROTOCOL,
    ),
    Mutant(
        "waiting: also for who was late the last time",
        "if m.punctual and m.lag.value <= next_quorum:",
        "if m.lag.value <= next_quorum:",
        PROTOCOL,
    ),
    Mutant(
        "waiting: at no cost for those that are in",
        "number - AGE * lag / interval * (len(r.arrived) + number)",
        "number - AGE * lag / interval",
        PROTOCOL,
    ),
    Mutant(
        "waiting: not for an offer that comes behind another",
        "bound = max(m.lag.bound, BEHIND_ANOTHER * (m.delivery.value or 0.0))",
        "bound = m.lag.bound",
        PROTOCOL,
    ),
    Mutant(
        "learner: offers queue up for a link that is full",
        "self._room = 1 + taken * 3 // 2 - waiting if held_back else math.inf",
        "self._room = math.inf",
        PROTOCOL,
    ),
    Mutant(
        "learner: offers held back at its last step are never made",
        "held_back = self._offer_now() if self.done and not self._started else ()",
        "held_back = ()",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer that comes in the grace window is refused",
        "return asked and m.state is State.LIVE and r.phase is not Phase.MERGING and r.lacks(c)",
        "return asked and m.state is State.LIVE and r.phase is Phase.GATHERING and r.lacks(c)",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a fragment's next turn comes one step early",
        "enough and front >= due.step + self._interval",
        "enough and front + 1 >= due.step + self._interval",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a learner whose offer failed is never asked again",
        "return self.failed.get(m.learner) == (m.incarnation, m.reports)",
        "return m.learner in self.failed",
        PROTOCOL,
    ),
    # Reports that can be true.
    Mutant(
        "reports: any clock is believed",
        "return step <= furthest + self._policy.interval",
        "return True",
        PROTOCOL,
    ),
    Mutant(
        "reports: a pause makes steps as fast as they come after it",
        "return self._median if now >= self._paused_until else self._before[2]",
        "return self._median",
        PROTOCOL,
    ),
    Mutant(
        "reports: one learner bears itself out",
        "gone = said[(len(said) - 1) // 2] - self._left",
        "gone = said[0] - self._left",
        PROTOCOL,
    ),
    Mutant(
        "reports: one that is alone before the others are back sets the pace",
        "if self._median is None and median and self._members.count < len(self._witnesses(now)):",
        "if False:",
        PROTOCOL,
    ),
    # Asking.
    Mutant(
        "asking: nobody is asked early",
        "if r.id.step - of <= m.lead and",
        "if r.id.step <= of and",
        PROTOCOL,
    ),
    Mutant(
        "asking: slow and far learners are asked for the due step",
        "return min(r.id.step, m.step + max(0, steps))",
        "return r.id.step",
        PROTOCOL,
    ),
    Mutant(
        "asking: the clock asked for passes the due step",
        "return min(r.id.step, m.step + max(0, steps))",
        "return m.step + max(0, steps)",
        PROTOCOL,
    ),
    Mutant(
        "asking: learners that are late in the window are not asked again",
        "return [self._tell(r, late, 0)] if late else []",
        "return []",
        PROTOCOL,
    ),
    Mutant(
        "asking: who misses a round is asked for the same the next time",
        "m.margin = min(self._policy.interval / 4, m.margin + MISSED)",
        "pass",
        PROTOCOL,
    ),
    Mutant(
        "asking: who misses a round is asked as late the next time",
        "m.lead = min(self._policy.interval, m.lead + 1)",
        "pass",
        PROTOCOL,
    ),
    Mutant(
        "asking: a margin never shrinks",
        "m.margin = max(0.0, m.margin - IN_TIME)",
        "pass",
        PROTOCOL,
    ),
    # The learner's core.
    Mutant(
        "learner: a stale update is applied",
        "if event.version <= old.version:",
        "if event.version < old.version:",
        PROTOCOL,
    ),
    Mutant(
        "learner: the run-ahead bound allows one step more",
        "return any(self.clock - due >= bound for due in self._outstanding())",
        "return any(self.clock - due > bound for due in self._outstanding())",
        PROTOCOL,
    ),
    Mutant(
        "learner: an update does not move the clock",
        "self.clock = event.step\n        rebase",
        "pass\n        rebase",
        PROTOCOL,
    ),
    Mutant(
        "learner: the band is ignored",
        "if event.step - self.clock > self.policy.band:",
        "if event.step > self.clock:",
        PROTOCOL,
    ),
    Mutant(
        "learner: rebase counts the steps that were merged twice",
        "base = old.offered[merged]",
        "base = old.base",
        PROTOCOL,
    ),
    Mutant(
        "learner: what a process that is lost gave beyond the checkpoint counts as this one's work",
        "steps = min(mark.steps, self._lives.get(mark.life, mark.steps))",
        "steps = mark.steps",
        PROTOCOL,
    ),
    Mutant(
        "learner: an offer that an update has overtaken is sent",
        "kept = tuple(o for o in step.offers if o.asked.round.fragment != fragment or not which(o))",
        "kept = step.offers",
        PROTOCOL,
    ),
    Mutant(
        "learner: an offer is made one step late",
        "self._has_work(f) and self.clock >= asked.clock:",
        "self._has_work(f) and self.clock > asked.clock:",
        PROTOCOL,
    ),
    Mutant(
        "learner: a heartbeat in mid-step tells of the step that is under way",
        "return [] if self._last is None else self._reports(self._last)",
        "return self._reports(self._standing())",
        PROTOCOL,
    ),
    Mutant(
        "learner: a returner claims the step that is under way",
        "finished = max(self._reported_step, session.joined_step)  # not the step that is under way",
        "finished = self.clock",
        PROTOCOL,
    ),
    Mutant(
        "snapshot: no learner but the first to write is waited for",
        "if taking.awaited:",
        "if taking.awaited and not taking.written:",
        ("workers/test_snapshots.py",),
    ),
)
