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
        "clocks: a cut is consistent with versions that the syncer lacks",
        "all(state.version(p) <= syncer.version(p) for p in state.versions)",
        "all(state.version(p) <= syncer.version(p) + 1 for p in state.versions)",
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
    # Membership and attendance.
    Mutant(
        "attendance: an older incarnation joins as if it were new",
        "if old is not None and incarnation < old.incarnation:",
        "if old is not None and incarnation < old.incarnation - 1:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a departed incarnation may come back",
        "if counts or old.state is State.GONE:",
        "if counts:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: silence begins one instant late",
        "if now >= m.heard_at + self.policy.silence_timeout and not self.done(m):",
        "if now > m.heard_at + self.policy.silence_timeout and not self.done(m):",
        PROTOCOL,
    ),
    Mutant(
        "attendance: an update that was lost is never sent again",
        "elif now >= sent_at + self.policy.resend_timeout:",
        "elif now < sent_at:",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a learner may claim a version that was never made",
        "return all(0 <= theirs <= ours for theirs, ours in zip(versions, merged.versions, strict=True))",
        "return all(0 <= theirs <= ours + 1 for theirs, ours in zip(versions, merged.versions, strict=True))",
        PROTOCOL,
    ),
    Mutant(
        "attendance: a step past the last one is believed",
        "past_the_end = self.total_steps is not None and step > self.total_steps",
        "past_the_end = self.total_steps is not None and step > self.total_steps + 1",
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
        "receivers = [m for m in self._members.present() if m.state is not State.JOINING]",
        "receivers = self._members.present()",
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
        "return min(len(there), len(r.arrived)) >= self.policy.quorum",
        "return min(len(there), len(r.arrived)) >= max(1, self.policy.quorum - 1)",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a merge is made of fewer than its quorum once an old offer was put back",
        "        if not self._has_quorum(r):\n            r.phase",
        "        if not r.arrived:\n            r.phase",
        PROTOCOL,
    ),
    Mutant(
        "rounds: work on an older version is merged",
        "or c.version != r.version or",
        "or c.version > r.version or",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a contribution of no steps is merged",
        "or c.steps < 1 or",
        "or c.steps < 0 or",
        PROTOCOL,
    ),
    Mutant(
        "rounds: one more round is in flight than the overlap allows",
        "if sum(other.phase is Phase.MERGING for other in self._rounds) >= max(1, self.policy.overlap):",
        "if sum(other.phase is Phase.MERGING for other in self._rounds) > max(1, self.policy.overlap):",
        PROTOCOL,
    ),
    Mutant(
        "rounds: an offer that does not come is given up one instant late",
        "elif asked.due is not None and now >= asked.due:",
        "elif asked.due is not None and now > asked.due:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: the grace window does not end when all are in",
        "return not self.owed or self.deadline is None or now >= self.deadline",
        "return self.deadline is None or now >= self.deadline",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a late fragment is refused although nothing is being merged",
        "return asked and r.phase is not Phase.MERGING and c.learner not in r.arrived",
        "return asked and r.phase is Phase.GATHERING and c.learner not in r.arrived",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a round that a bounded run could still merge is skipped",
        "return self.policy.max_run_ahead is None and enough and",
        "return enough and",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a fragment's next turn comes one step early",
        "next_turn = due.step + self.policy.interval",
        "next_turn = due.step + self.policy.interval - 1",
        PROTOCOL,
    ),
    Mutant(
        "rounds: after a failed offer never asked again",
        "return self.failed.get(m.learner) == (m.incarnation, m.reports)",
        "return m.learner in self.failed",
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
        "learner: an update does not move the clock of one that lags by more than the band",
        "if event.step - self.clock > self.policy.band:\n            self.clock = event.step\n",
        "",
        PROTOCOL,
    ),
    Mutant(
        "learner: an offer is made a step early",
        "and f.steps and self.clock >= asked.clock:",
        "and f.steps and self.clock >= asked.clock - 1:",
        PROTOCOL,
    ),
    Mutant(
        "learner: a returner claims the step that is under way",
        "finished = max(self._reported_step, self._joined_step)  # not the step that is under way",
        "finished = self.clock",
        PROTOCOL,
    ),
    Mutant(
        "snapshot: the mark of an earlier snapshot counts",
        "if not self.told(mark.learner) or mark.number != self.epoch:",
        "if not self.told(mark.learner):",
        PROTOCOL,
    ),
)
