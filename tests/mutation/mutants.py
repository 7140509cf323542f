"""The mistakes: each a text of the package, what to put in its place, and the tests that should notice.

The text stands in the package once, and is looked for in all of its files, so that moving code moves nothing
here. Tests are named by the end of their path.
"""

from __future__ import annotations

from typing import NamedTuple

PROTOCOL = ("tests/protocol", "chaos/test_liveness.py", "chaos/test_schedules.py")
MERGING = ("outer/test_merging.py", "outer/test_outer_step.py")
CODECS = ("outer/test_codecs.py",)
WIRE = ("remote/test_payload.py", "remote/test_messages.py", "remote/test_buffers.py", "remote/test_wire.py")


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
      name: what is wrong with it, in a few words.
      old: the text of the package.
      new: the mistake in its place.
      tests: files or folders, the likeliest to notice first.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


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
        "return count >= self.policy.quorum",
        "return count >= max(1, self.policy.quorum - 1)",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a merge is made of fewer than its quorum after failed pulls",
        "if len(r.arrived) < (self.policy.quorum or 1):",
        "if len(r.arrived) < 1:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: work on an older version is merged",
        "or c.version != self.versions[r.id.fragment]",
        "or c.version > self.versions[r.id.fragment]",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a contribution of no steps is merged",
        "            or c.steps < 1\n",
        "            or c.steps < 0\n",
        PROTOCOL,
    ),
    Mutant(
        "rounds: one more round is in flight than the overlap allows",
        "elif len(self._rounds) < max(1, self.policy.overlap):",
        "elif len(self._rounds) <= max(1, self.policy.overlap):",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a pull is given up one instant late",
        "if r.phase is Phase.PULLING and r.overdue(now):",
        "if r.phase is Phase.PULLING and r.deadline is not None and now > r.deadline:",
        PROTOCOL,
    ),
    Mutant(
        "rounds: the grace window does not end when all are in",
        "if r.phase is Phase.GRACE and (r.overdue(now) or not self._behind(r.id.step)):",
        "if r.phase is Phase.GRACE and r.overdue(now):",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a late fragment is refused even while the round gathers again",
        "return asked and r.phase is not Phase.MERGING and c.learner not in r.arrived",
        "return asked and r.phase is Phase.PULLING and c.learner not in r.arrived",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a round that a bounded run could still merge is skipped",
        "if self.policy.max_run_ahead is not None:\n            return False\n",
        "",
        PROTOCOL,
    ),
    Mutant(
        "rounds: a fragment's next turn comes one step early",
        "return self._quorum_clock() >= due.step + self.policy.interval",
        "return self._quorum_clock() >= due.step + self.policy.interval - 1",
        PROTOCOL,
    ),
    Mutant(
        "rounds: passed over for ever",
        "return self.passed_over.get(learner) == (incarnation, reports)",
        "return learner in self.passed_over",
        PROTOCOL,
    ),
    # The learner's core.
    Mutant(
        "learner: a stale update is applied",
        "if event.version <= fragment.version:",
        "if event.version < fragment.version:",
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
        "self.clock = max(self.clock, event.step)",
        "pass",
        PROTOCOL,
    ),
    Mutant(
        "learner: snapshots end one step before the overlap does",
        "fresh = self.clock - due <= self.policy.overlap",
        "fresh = self.clock - due < self.policy.overlap",
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
    # The mathematics.
    Mutant(
        "weights: steps count, not tokens a step",
        "return c_tokens * (c_tokens / c_steps) if c_steps else 0.0",
        "return c_tokens * c_steps if c_steps else 0.0",
        ("outer/test_contribution_weights.py", *MERGING),
    ),
    Mutant(
        "merging: a learner that would not move counts in the mean of directions",
        "pointing = jnp.where(norms > 0, shares, 0)",
        "pointing = shares",
        MERGING,
    ),
    Mutant(
        "merging: opposite directions have no fallback",
        "degenerate = ~(agreement > DEGENERATE * pointing.sum())",
        "degenerate = ~(agreement > 0)",
        MERGING,
    ),
    Mutant(
        "merging: the degenerate case is scaled like the other",
        "scale = jnp.where(degenerate, 1, jnp.dot(shares, norms) / agreement)",
        "scale = jnp.dot(shares, norms) / agreement",
        MERGING,
    ),
    Mutant(
        "merging: norms of absent learners count",
        "return jnp.where(shares > 0, norms, 0)  # an absent learner's norm may have overflowed",
        "return norms",
        MERGING,
    ),
    Mutant(
        "outer step: embeddings are merged by direction too",
        '"direct" if is_embedding(piece.name) else self._config.merge',
        "self._config.merge",
        ("outer/test_outer_step.py", "outer/test_global_model.py"),
    ),
    Mutant(
        "optimizer: rho's average is not corrected for its start",
        "rho = jnp.where(times > 0, rho_sum / (1 - rho_decay ** jnp.maximum(times, 1)), 0)",
        "rho = jnp.where(times > 0, rho_sum, 0)",
        ("outer/test_optimizer.py",),
    ),
    Mutant(
        "optimizer: the moving average has the gain of momentum",
        "lambda u, g: decay * u + (1 - decay) * g, state.average, gradients",
        "lambda u, g: decay * u + g, state.average, gradients",
        ("outer/test_optimizer.py",),
    ),
    Mutant(
        "codecs: codes are cut, not rounded",
        "multiples = jnp.round(blocks / jnp.where(used, scales, 1.0)[:, None])",
        "multiples = jnp.trunc(blocks / jnp.where(used, scales, 1.0)[:, None])",
        CODECS,
    ),
    Mutant(
        "codecs: the most negative of four bits is read as positive",
        "return _scaled(scales, jnp.where(nibbles > 7, nibbles - 16, nibbles), shape)",
        "return _scaled(scales, jnp.where(nibbles > 9, nibbles - 16, nibbles), shape)",
        CODECS,
    ),
    Mutant(
        "codecs: a block that is not finite becomes numbers",
        "return jnp.where(finite, scales, jnp.nan), codes.astype(jnp.int8)",
        "return jnp.where(finite, scales, 0.0), codes.astype(jnp.int8)",
        CODECS,
    ),
    Mutant(
        "encoding: error feedback keeps what was unsound",
        "sound = jnp.isfinite(jnp.sum(jnp.square(value)))",
        "sound = True",
        ("outer/test_codecs.py", "test_corruption.py", "roles/test_codecs.py"),
    ),
    Mutant(
        "fragments: no cut is finer than the mean",
        'cuts = (1, 2, 3) if split_large and strategy == "balanced" else (1,)',
        "cuts = (1,)",
        ("outer/test_fragments.py",),
    ),
    Mutant(
        "global model: values whose squares overflow are let in",
        "            if not math.isfinite(square):",
        "            if math.isnan(square):",
        ("outer/test_global_model.py",),
    ),
    Mutant(
        "global model: a merge without work makes no version",
        "        self._versions[p] += 1\n",
        "        self._versions[p] += bool(metrics)\n",
        ("outer/test_global_model.py",),
    ),
    # The wire.
    Mutant(
        "payload: a fragment of another size is awaited",
        '        if size != expected:\n            raise WireError("fragment of another size"',
        '        if size > expected:\n            raise WireError("fragment of another size"',
        WIRE,
    ),
    Mutant(
        "payload: a chunk may be longer than what is left",
        "if not 0 < len(chunk) <= self.left:",
        "if not 0 < len(chunk):",
        WIRE,
    ),
    Mutant(
        "messages: numbers that a float64 cannot hold pass",
        "if max(values) > LARGEST:",
        "if max(values) > 1 << 60:",
        WIRE,
    ),
    Mutant(
        "messages: another fragment is taken for the one asked for",
        "if contribution.fragment != fragment:",
        "if contribution.fragment < fragment:",
        WIRE,
    ),
    Mutant(
        "downlink: a version that was sent is sent again",
        "if self._newest.get(fragment).version > self._sent.get(fragment, -1):",
        "if self._newest.get(fragment).version >= self._sent.get(fragment, -1):",
        WIRE,
    ),
    Mutant(
        "downlink: parts of two welcomes are put together",
        "self._welcome, self._collected = header.welcome, {}",
        "self._welcome = header.welcome",
        WIRE,
    ),
    Mutant(
        "intake: a record that comes twice counts twice",
        "if number >= known.next:",
        "if number >= known.next - 1:",
        WIRE,
    ),
    Mutant(
        "intake: a process that was replaced is heard again",
        "if process in replaced and (known.lost_at is None or process < known.process):",
        "if process in replaced and process < known.process:",
        (*WIRE, "integration/test_hangs.py"),
    ),
    Mutant(
        "outbox: records that are confirmed are sent again",
        "while self._records and self._first < following:",
        "while self._records and self._first < following - 1:",
        WIRE,
    ),
    Mutant(
        "outbox: what a lost connection may have lost is not said anew",
        "self._sent = self._first\n            if self._presence",
        "if self._presence",
        WIRE,
    ),
    Mutant(
        "positions: one of any length is kept",
        "if len(position) > LONGEST:",
        "if len(position) > 100 * LONGEST:",
        WIRE,
    ),
    Mutant(
        "resumed: a learner that has come back is sent to the snapshot again",
        "return self.name.number if newest_incarnation <= self.incarnations.get(learner, 0) else 0",
        "return self.name.number",
        ("remote/test_origins.py", "remote/test_snapshots.py", *WIRE),
    ),
    Mutant(
        "donor: an inner state of older versions is taken",
        "short = len(had) != len(versions) or any(a < b for a, b in zip(had, versions, strict=True))",
        "short = len(had) != len(versions) or all(a < b for a, b in zip(had, versions, strict=True))",
        ("remote/test_donor.py",),
    ),
    Mutant(
        "donor: an inner state with a number that is not finite is taken",
        "if not all(np.isfinite(a).all() for a in arrays if np.issubdtype(a.dtype, np.floating)):",
        "if not all(np.isfinite(a).any() for a in arrays if np.issubdtype(a.dtype, np.floating)):",
        ("remote/test_donor.py",),
    ),
    Mutant(
        "server: an incarnation beyond belief is believed",
        "if report.incarnation > time.time_ns() // 1000 + FURTHEST_AHEAD:",
        "if report.incarnation > 1 << 60:",
        (*WIRE, "integration/test_hangs.py"),
    ),
    Mutant(
        "server: a push without a deadline is taken",
        "if left is None or left > 2 * self._terms.pull_timeout:",
        "if left is None:",
        (*WIRE, "remote/test_half_sent.py", "integration/test_hangs.py"),
    ),
    Mutant(
        "terms: the number of steps need not be the same",
        'if leaf.metadata["both_ends"]}',
        'if leaf.metadata["both_ends"] and leaf.path != "train.steps"}',
        ("remote/test_terms.py",),
    ),
    Mutant(
        "disk: a file whose checksum does not fit is read",
        "if not data.startswith(magic) or hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:",
        "if not data.startswith(magic):",
        ("test_durable.py", "remote/test_donor.py"),
    ),
)
