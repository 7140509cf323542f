"""Dealing again: over the fleet each document is read once in the epoch that was cut, and in later ones."""

import collections
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.data import tokenized
from ddiloco.data.batches import Batches, Selection
from ddiloco.data.errors import DataError
from ddiloco.data.images import Examples
from ddiloco.data.shards import ShardStream, reshard
from ddiloco.data.text import InterleavedRows, make_text_batches
from ddiloco.data.tokenizers import ByteTokenizer
from tests.long import times

LENGTH = 5  # tokens in a row


class Library:
    """Documents whose every token tells its epoch, its document and its place."""

    def __init__(self, lengths, lanes):
        self.lengths = lengths
        self.lanes = lanes

    def code(self, epoch, document, place):
        return (epoch * len(self.lengths) + document) * 16 + place

    def decoded(self, token):
        rest, place = divmod(int(token), 16)
        return (*divmod(rest, len(self.lengths)), place)

    def tokens(self, epoch, document):
        return np.array([self.code(epoch, document, i) for i in range(self.lengths[document])], np.int32)

    def by_itself(self, shard, num_shards):
        own = range(shard, len(self.lengths), num_shards)

        def read(n):
            epoch, i = divmod(n, len(own))
            return self.tokens(epoch, own[(i * 7 + epoch) % len(own)] if len(own) % 7 else own[i])

        return read

    def texts(self, shard, num_shards):
        lanes = min(self.lanes, len(range(shard, len(self.lengths), num_shards)))

        def packed(document):
            return InterleavedRows(document, len(self.lengths), LENGTH, lanes)

        return self._stream(packed, shard, num_shards)

    def examples(self, shard, num_shards):
        def stacked(document):
            return Examples(lambda n: {"inputs": document(n)[:1], "weights": np.int32(1)})

        return self._stream(stacked, shard, num_shards)

    def _stream(self, rows, shard, num_shards):
        return ShardStream(self.by_itself, rows, shard, num_shards, len(self.lengths))

    def fleet(self, kind, num_shards, states=None):
        """Batches of a row, one of each shard, going on from these states."""
        identity = {"records": len(self.lengths), "num_shards": num_shards, "seed": 0}
        made = [Batches({m: getattr(self, kind)(m, num_shards)}, 1, identity, 0) for m in range(num_shards)]
        for batches, state in zip(made, states or [], strict=bool(states)):
            batches.set_state(json.loads(json.dumps(state)))
        return made


def read(batches, rows, seen):
    """Reads so many rows; counts what came as input."""
    for _ in range(rows):
        seen.update(next(batches)["inputs"].reshape(-1).tolist())


def epochs_begun(fleet, lengths):
    """By shard, the epoch of the newest document that it has begun."""
    begun = {}
    for shard, batches in enumerate(fleet):
        at = batches.get_state()["shards"][str(shard)]
        number = max((at if isinstance(at, int) else at[1]) - 1, 0)
        begun[shard] = number // len(range(shard, len(lengths), len(fleet)))
    return begun


def whole(library, kind, begun):
    """Every token of the epochs of each shard, up to the one that it had begun, once."""
    return collections.Counter(
        library.code(epoch, document, place)
        for document, length in enumerate(library.lengths)
        for epoch in range(begun[document % len(begun)] + 1)
        for place in range(length if kind == "texts" else 1)
    )


def of_epochs(library, seen, epochs):
    """What was read of these epochs."""
    return collections.Counter({t: n for t, n in seen.items() if library.decoded(t)[0] in epochs})


def finish(library, fleet, seen):
    """Reads on until every shard has read all that was dealt to it and a whole epoch of its own."""
    for shard, batches in enumerate(fleet):
        [position] = batches.get_state()["shards"].values()
        left = sum(stop - first for _, _, first, stop, _ in position["left"])
        own = len(range(shard, len(library.lengths), len(fleet)))
        read(batches, (left + own + 2 * library.lanes) * (max(library.lengths) // LENGTH + 2), seen)


@pytest.mark.parametrize("kind", ["texts", "examples"])
@given(
    lengths=st.lists(st.integers(1, 15), min_size=6, max_size=24),
    lanes=st.integers(1, 4),
    fleets=st.lists(st.integers(1, 6), min_size=2, max_size=4).filter(lambda f: f[0] != f[1]),
    counts=st.lists(st.lists(st.integers(0, 30), min_size=6, max_size=6), min_size=4, max_size=4),
)
@settings(max_examples=times(15, 60))
def test_no_token_of_an_epoch_is_lost_or_repeated(kind, lengths, lanes, fleets, counts):
    library = Library(lengths, lanes)
    seen, fleet = collections.Counter(), library.fleet(kind, fleets[0])
    begun, after_the_first = None, None
    for num_shards, rows in zip(fleets, counts, strict=False):
        if num_shards != len(fleet):
            begun = begun or epochs_begun(fleet, lengths)
        fleet = library.fleet(kind, num_shards, reshard([b.get_state() for b in fleet], num_shards))
        if begun and after_the_first is None:
            after_the_first = fleet[0].get_state()["shards"]["0"]["epoch"]
        for batches, number in zip(fleet, rows, strict=False):
            read(batches, number, seen)
    states = [batches.get_state() for batches in fleet]
    finish(library, fleet, seen)
    assert max(seen.values()) == 1
    assert after_the_first == max(begun.values()) + 1
    cut_in = range(max(begun.values()) + 1)
    assert of_epochs(library, seen, cut_in) == whole(library, kind, begun)
    first_own = states[0]["shards"]["0"]["epoch"]
    every = dict.fromkeys(range(len(fleet)), first_own)
    assert of_epochs(library, seen, [first_own]) == of_epochs(
        library, whole(library, kind, every), [first_own]
    )
    again, first, second = (
        library.fleet(kind, len(fleet), states),
        collections.Counter(),
        collections.Counter(),
    )
    finish(library, again, first)
    finish(library, library.fleet(kind, len(fleet), states), second)
    assert first == second
    assert [b.get_state() for b in again] == [b.get_state() for b in fleet]


def test_a_stream_that_has_read_takes_what_is_dealt_as_a_fresh_one_does():
    library = Library([13] * 12, lanes=2)
    before = library.fleet("texts", 3)
    for batches in before:
        read(batches, 4, collections.Counter())
    dealt = reshard([batches.get_state() for batches in before], 2)
    used, fresh = library.fleet("texts", 2), library.fleet("texts", 2, dealt)
    for batches, other, state in zip(used, fresh, dealt, strict=True):
        read(batches, 1, collections.Counter())
        batches.set_state(state)
        first, second = collections.Counter(), collections.Counter()
        read(batches, 5, first)
        read(other, 5, second)
        assert first == second
        assert batches.get_state() == other.get_state()


def test_what_is_left_is_dealt_evenly():
    library = Library([6] * 40, lanes=2)
    fleet = library.fleet("texts", 4)
    read(fleet[0], 8, collections.Counter())
    counts = []
    for state in reshard([batches.get_state() for batches in fleet], 3):
        [position] = state["shards"].values()
        counts.append(sum(stop - first for _, _, first, stop, _ in position["left"]))
    assert sum(counts) == 34  # 8 rows of 5 tokens are 6 documents and parts of two more
    assert max(counts) - min(counts) <= 2


def test_of_a_shard_without_a_state_the_newest_epoch_counts_as_left():
    library = Library([4] * 12, lanes=1)
    fleet = library.fleet("texts", 3)
    read(fleet[0], 4, collections.Counter())  # 20 tokens: past its epoch of 4 documents
    left = [fleet[0].get_state(), fleet[2].get_state()]
    same = reshard(left, 3)
    assert (same[0], same[2]) == (left[0], left[1])
    seen = collections.Counter()
    read(library.fleet("texts", 3, same)[1], 3, seen)
    assert {library.decoded(token)[:2] for token in seen} <= {(1, d) for d in range(1, 12, 3)}
    seen.clear()
    fleet = library.fleet("texts", 2, reshard(left, 2))
    finish(library, fleet, seen)
    of_the_lost = {library.decoded(token)[:2] for token in seen if library.decoded(token)[1] % 3 == 1}
    assert {(1, d) for d in range(1, 12, 3)} <= of_the_lost
    assert all(epoch >= 1 for epoch, _ in of_the_lost)


@pytest.fixture
def few(config, monkeypatch):
    """The built-in text cut down to its 40 shortest documents, as the only data set."""
    source = tokenized.open_text(config.name, "train", config.data_dir)
    lengths = sorted((len(source[i]["text"]), i) for i in range(0, len(source), 8))
    texts = [source[i] for _, i in lengths if len(source[i]["text"]) > 200][:40]

    class Few(list):
        full_name = "few/1.0.0"

    monkeypatch.setattr(tokenized, "open_text", lambda *args, **kwargs: Few(texts))
    return dataclasses.replace(config, interleave=3)


def of_text(config, shards, num_shards, rows):
    return make_text_batches(config, ByteTokenizer(), Selection(shards, num_shards, rows, seed=5))


def lines(batches, count):
    return [row.tobytes() for _ in range(count) for row in next(batches)["inputs"]]


def test_a_job_on_all_shards_reads_what_learners_read_after_a_deal(few):
    config = dataclasses.replace(few, prefetch=2)
    job = of_text(config, range(4), 4, 8)
    lines(job, 3)
    state = json.loads(json.dumps(job.get_state()))
    job.close()
    [together] = reshard([state], 3, [(0, 1, 2)])
    job = of_text(config, range(3), 3, 6)
    job.set_state(together)
    learners = [of_text(config, (m,), 3, 2) for m in range(3)]
    for learner, own in zip(learners, reshard([state], 3), strict=True):
        learner.set_state(own)
    for _ in range(5):
        assert lines(job, 1) == [line for learner in learners for line in lines(learner, 1)]
    for batches in (job, *learners):
        batches.close()


def test_a_dealt_stream_of_text_goes_on_in_the_midst_of_documents(few):
    before = [of_text(few, (m,), 2, 1) for m in range(2)]
    inputs = collections.Counter()
    for batches in before:
        for _ in range(7):
            inputs.update(next(batches)["inputs"].reshape(-1).tolist())
    after = [of_text(few, (m,), 3, 1) for m in range(3)]
    ends = 0
    for batches, state in zip(after, reshard([b.get_state() for b in before], 3), strict=True):
        batches.set_state(state)
        [position] = state["shards"].values()
        ends += sum(offset > 0 for *_, offset in position["left"])
    assert ends == 6  # two shards of three lanes each, all in the midst of a document


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda states: states[1]["stream"].update(seed=1), "different streams"),
        (lambda states: states.append(states[0]), "the same shard more than once"),
        (lambda states: states[0]["shards"].update({"0": [0, "x"]}), "cannot be read"),
        (lambda states: states[0]["shards"].update({"0": {"left": [[1]], "epoch": 0}}), "cannot be read"),
        (lambda states: states[0].pop("shards"), "cannot be read"),
        (lambda states: states.clear(), "cannot be read"),
    ],
)
def test_states_that_cannot_be_dealt_are_told_in_one_line(harm, says):
    states = json.loads(json.dumps([b.get_state() for b in Library([4] * 12, 2).fleet("texts", 3)]))
    harm(states)
    with pytest.raises(DataError, match=says) as error:
        reshard(states, 2)
    assert "\n" not in str(error.value)
