"""Mistakes in what travels between processes, and what outlives them."""

from tests.mutation.mutant import Mutant

WIRE = tuple(
    f"remote/test_{name}.py" for name in ("payload", "messages", "buffers", "wire", "offers", "refusals")
)

MUTANTS = (
    Mutant(
        "payload: a fragment of another size is awaited",
        'if size != expected:\n            raise WireError("fragment of another size"',
        'if size > expected:\n            raise WireError("fragment of another size"',
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
        "if most > LARGEST or least < -LARGEST:",
        "if most > 1 << 60 or least < -LARGEST:",
        WIRE,
    ),
    Mutant(
        "messages: another fragment is taken for the one asked for",
        "if contribution.fragment != round_id.fragment or",
        "if contribution.fragment > round_id.fragment or",
        WIRE,
    ),
    Mutant(
        "downlink: a version that was sent is sent again",
        "if self._newest.get(fragment).update.version > self._sent.get(fragment, -1):",
        "if self._newest.get(fragment).update.version >= self._sent.get(fragment, -1):",
        WIRE,
    ),
    Mutant(
        "streams: parts of two welcomes are put together",
        "self._welcome, self._collected, self._data = header.welcome, {}, NOTHING_MERGED",
        "self._welcome, self._delivered = header.welcome, {}",
        WIRE,
    ),
    Mutant(
        "record queue: a record that was counted as lost is taken",
        "if number >= (self._following or 0):",
        "if number >= (self._following or 1) - 1:",
        WIRE,
    ),
    Mutant(
        "intake: a process that was replaced sends messages again",
        "if process in replaced and (known.lost_at is None or process < known.process):",
        "if process in replaced and process < known.process:",
        (*WIRE, "integration/test_hangs.py"),
    ),
    Mutant(
        "record queue: what is given up is not missing in the numbers",
        "self.first += len(self._waiting) == self._waiting.maxlen",
        "self.first += len(self._waiting) > self._waiting.maxlen",
        WIRE,
    ),
    Mutant(
        "outbox: what a lost connection may have lost is not said again",
        "self._events.append(self._presence)",
        "pass",
        WIRE,
    ),
    Mutant(
        "offers: a position of any length is kept",
        "if len(contribution.upto.position) > MAX_POSITION_LENGTH:",
        "if len(contribution.upto.position) > 100 * MAX_POSITION_LENGTH:",
        WIRE,
    ),
    Mutant(
        "hosts: the others keep all of a learner's work as an update with an offer of it is applied",
        '"mixing": mixing, "merged": merged, "rebase": rebase}',
        '"mixing": mixing, "merged": None, "rebase": rebase}',
        ("studies/schedules/test_exact_sums.py",),
    ),
    Mutant(
        "hosts: a snapshot's checkpoint is said to be there before all hosts have written theirs",
        "self._followers.done(copy, time.monotonic() + bounded_reads.LONGEST)",
        "pass",
        ("remote/test_followers.py",),
    ),
    Mutant(
        "donor: an inner state of older versions is taken",
        "if len(had) != len(versions) or any(a < b for a, b in zip(had, versions, strict=True)):",
        "if len(had) != len(versions) or all(a < b for a, b in zip(had, versions, strict=True)):",
        ("remote/test_donor.py",),
    ),
    Mutant(
        "donor: an inner state with a number that is not finite is taken",
        "return all(np.isfinite(block).all() for block in blocks)",
        "return all(np.isfinite(block).any() for block in blocks)",
        ("remote/test_donor.py",),
    ),
    Mutant(
        "server: an incarnation beyond belief is believed",
        "if report.incarnation > most:",
        "if report.incarnation > 1 << 60:",
        (*WIRE, "integration/test_hangs.py"),
    ),
    Mutant(
        "server: an offer may take for ever",
        "self._read(session, host, call, most)",
        "self._read(session, host, call, 1e6)",
        (*WIRE, "remote/test_half_sent.py", "integration/test_hangs.py"),
    ),
    Mutant(
        "admission: a second process is let in while the first speaks",
        "if now >= present.heard_at + self._terms.silence_timeout:",
        "if now >= present.heard_at:",
        ("remote/test_identity.py",),
    ),
    Mutant(
        "admission: credentials of another learner do",
        "if caller.learner is not None and caller.learner != hello.learner:",
        "if caller.learner is None and caller.learner != hello.learner:",
        ("remote/test_identity.py",),
    ),
    Mutant(
        "admission: a learner of another run is let in",
        "if hello.run and hello.run != self._run:",
        "if hello.run != hello.run:",
        ("remote/test_identity.py",),
    ),
    Mutant(
        "recovery: a peer's state with fewer steps in it replaces the own copy",
        "state = self._tried(self._taken, donation) if donation.trained >= least else None",
        "state = self._tried(self._taken, donation)",
        ("remote/test_recovery.py",),
    ),
    Mutant(
        "recovery: who asks for an inner state has others wait for its own",
        "self._steps = False\n        self._stepping(False)",
        "self._steps = False",
        ("remote/test_recovery.py",),
    ),
    Mutant(
        "durable: files of two runs are taken for one",
        'if header.get("run", "") != self.run:',
        'if header.get("run", "") == "no":',
        ("test_durable.py",),
    ),
    Mutant(
        "terms: the number of steps need not be the same",
        "rules = {leaf.path: leaf.value for leaf in found if",
        'rules = {leaf.path: leaf.value for leaf in found if leaf.path != "train.steps" and',
        ("remote/test_compatibility.py",),
    ),
    Mutant(
        "disk: a file whose checksum does not fit is read",
        "if not data.startswith(begin) or check != data[-_CRC_BYTES:]:",
        "if not data.startswith(begin):",
        ("test_array_file.py",),
    ),
)
