"""The global model: versions, ownership of memory, validation, checkpoints and the hash of parameters."""

import hashlib

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment, take
from ddiloco.outer.global_model import FragmentState, GlobalModel, InvalidContribution, parameters_sha256
from ddiloco.outer.guards import GuardConfig
from ddiloco.outer.optimizer import OuterConfig

SHAPES = {"embed/table": (60, 4), "layers/0/w": (8, 8), "layers/1/w": (8, 8), "norm/scale": (8,)}
LAYOUT = fragment(SHAPES, 3, "balanced")


def parameters(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def model(**settings):
    return GlobalModel(LAYOUT, parameters(0), OuterConfig(**settings), 4)


def merge(global_model, p, seeds, count=(2, 100)):
    sent = [take(LAYOUT, p, parameters(seed)) for seed in seeds]
    return merged(global_model, p, sent, [count] * len(seeds))


def merged(global_model, p, sent, counts, learners=()):
    return global_model.merge(p, [global_model.read(p, pieces) for pieces in sent], counts, learners)


def test_a_model_does_not_follow_changes_of_the_arrays_it_was_given():
    given = parameters(0)
    fresh = GlobalModel(LAYOUT, given, OuterConfig(), 4)
    for tensor in given.values():
        tensor[...] = 0
    assert fresh.sha256() == parameters_sha256(parameters(0))


def test_merging_replaces_one_fragment_and_counts_its_version():
    m = model(optimizer="direct")
    before = [m.fragment(p)[1] for p in range(3)]
    pieces, metrics, *_ = merge(m, 1, [7])
    assert [m.fragment(p)[0] for p in range(3)] == [0, 1, 0]
    for got, want in zip(pieces, take(LAYOUT, 1, parameters(7)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    for p in (0, 2):
        for now, then in zip(m.fragment(p)[1], before[p], strict=True):
            np.testing.assert_array_equal(now, then)
    for got, want in zip(take(LAYOUT, 1, m.parameters()), pieces, strict=True):
        np.testing.assert_array_equal(got, want)
    assert {"outer_gradient_norm", "learner_delta_norm", "cosine"} <= set(metrics)
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("optimizer", ["nesterov", "direct"])
def test_versions_handed_out_keep_their_values_through_later_merges(optimizer):
    m = model(optimizer=optimizer)
    held = []
    for version in range(8):
        _, pieces = m.fragment(0)
        whole = m.parameters()
        held.append((pieces, [x.copy() for x in pieces], whole, {n: x.copy() for n, x in whole.items()}))
        merge(m, 0, [version, version + 1])
        for pieces, copies, whole, whole_copies in held:
            assert all(np.array_equal(a, b) for a, b in zip(pieces, copies, strict=True))
            assert all(np.array_equal(whole[name], whole_copies[name]) for name in SHAPES)
        if version == 4:
            del held[:3]  # from here on some memory is free to be written again


def test_what_is_handed_out_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        model().fragment(0)[1][0][...] = 0


def test_a_merge_of_no_weight_changes_nothing_and_makes_no_version():
    m = model(momentum=0.9)
    merge(m, 0, [1])
    before = m.state(0)
    pieces, metrics, *_, empty = merge(m, 0, [3, 4], (0, 0))
    after = m.state(0)
    assert (after.version, metrics, empty) == (before.version, {}, True)
    for a, b in zip((*after.pieces, *after.optimizer), (*before.pieces, *before.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.array_equal(a, b) for a, b in zip(pieces, before.pieces, strict=True))


@pytest.mark.parametrize("optimizer", ["nesterov", "delayed_nesterov", "adam"])
def test_a_restored_model_goes_on_exactly_as_the_saved_one(optimizer):
    original, restored = model(optimizer=optimizer), model(optimizer=optimizer)
    for p in range(3):
        for seed in range(3):
            merge(original, p, [seed, 5])
        restored.restore(p, original.state(p))
    assert restored.sha256() == original.sha256()
    states = [original.state(p) for p in range(3)]
    copies = [[x.copy() for x in (*state.pieces, *state.optimizer)] for state in states]
    for p in range(3):
        for seed in (6, 7, 8):
            assert merge(original, p, [seed])[1] == merge(restored, p, [seed])[1]
    assert [restored.fragment(p)[0] for p in range(3)] == [6, 6, 6]
    assert restored.sha256() == original.sha256()
    for state, copy in zip(states, copies, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip((*state.pieces, *state.optimizer), copy, strict=True))


def test_a_state_of_another_optimizer_or_fragment_is_refused():
    m = model(optimizer="nesterov")
    for state in (model(optimizer="adam").state(0), FragmentState(0, (), ())):
        with pytest.raises(ValueError, match="saved state of fragment 0 is not of this layout"):
            m.restore(0, state)


def test_parameters_of_another_layout_are_refused():
    wrong = {**parameters(0), "norm/scale": np.zeros(9, np.float32)}
    with pytest.raises(ValueError, match="first to differ is norm/scale"):
        GlobalModel(LAYOUT, wrong, OuterConfig(), 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_contribution_with_one_value_that_is_not_a_usable_number_is_refused(value):
    pieces = [x.copy() for x in take(LAYOUT, 0, parameters(1))]
    pieces[-1].flat[3] = value
    with pytest.raises(InvalidContribution, match=r"holds values that are not finite or beyond 1e19"):
        model().read(0, pieces)


def test_sha256_is_over_names_dtypes_shapes_and_bytes_in_the_order_of_names():
    given = {"b": np.arange(3, dtype=np.int32), "a": np.ones((2, 1), np.float32)}
    content = b"a\0float32\0(2, 1)\0" + given["a"].tobytes() + b"b\0int32\0(3,)\0" + given["b"].tobytes()
    assert parameters_sha256(given) == hashlib.sha256(content).hexdigest()
    assert parameters_sha256(dict(reversed(given.items()))) == parameters_sha256(given)


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros((1, 2), np.float32)},
        {"b": np.zeros((2, 1), np.float32)},
        {"a": np.zeros((2, 1), np.int32)},
        {"a": np.array([[0], [1]], np.float32)},
        {"a": np.zeros((2, 1), np.float32), "b": np.zeros(())},
    ],
)
def test_sha256_tells_apart_what_differs(other):
    assert parameters_sha256(other) != parameters_sha256({"a": np.zeros((2, 1), np.float32)})


def near(p, seeds, scale=0.01):
    """What learners hold that have moved a little, half of it together."""
    theta, shared = take(LAYOUT, p, parameters(0)), take(LAYOUT, p, parameters(100))
    own = [take(LAYOUT, p, parameters(seed)) for seed in seeds]
    return [tuple(t - scale * (s + x) for t, s, x in zip(theta, shared, v, strict=True)) for v in own]


def test_an_offer_that_is_left_out_is_merged_as_if_it_had_not_come():
    with_liar, without = model(), model()
    honest = near(0, [1, 2, 3])
    [liar] = near(0, [4], scale=1e4)
    made = merged(with_liar, 0, [*honest, liar], [(2, 100)] * 4, learners=[5, 6, 7, 8])
    alone = merged(without, 0, honest, [(2, 100)] * 3, learners=[5, 6, 7])
    for ours, theirs in zip(made.pieces, alone.pieces, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert made.metrics == pytest.approx(alone.metrics, rel=1e-5)
    assert (made.left_out, alone.left_out) == ((8,), ())
    assert [(notice.kind, notice.learner) for notice in made.notices] == [("left_out", 8)]


def test_a_guard_without_gates_and_learners_without_numbers_leave_nobody_out():
    sent = [*near(0, [1, 2, 3]), *near(0, [4], scale=1e4)]
    ungated = model(guard=GuardConfig(gates=()))
    assert not merged(ungated, 0, sent, [(2, 100)] * 4, learners=[0, 1, 2, 3]).left_out
    assert not merged(model(), 0, sent, [(2, 100)] * 4).left_out


def test_no_version_is_made_of_offers_that_are_all_left_out():
    m = model()
    before = m.fragment(0)[1]
    [liar] = near(0, [4], scale=1e6)
    made = merged(m, 0, [liar], [(2, 100)], learners=[3])
    assert (made.left_out, made.metrics, made.empty, m.fragment(0)[0]) == ((3,), {}, True, 0)
    for ours, theirs in zip(made.pieces, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("update_codec", ["f32", "int4"])
def test_of_no_offers_the_last_version_comes_once_more_and_the_next_is_as_if_that_were_not(update_codec):
    m, other = model(update_codec=update_codec), model(update_codec=update_codec)
    for one in (m, other):
        merged(one, 0, near(0, [1, 2]), [(2, 100)] * 2, learners=[0, 1])
    before, state = m.fragment(0)[1], m.state(0)
    copies = tuple(map(np.array, before))
    made = merged(m, 0, [], [])
    assert (made.left_out, made.metrics, made.empty, made.difference) == ((), {}, False, ())
    assert m.fragment(0)[0] == 2
    for ours, theirs in zip(
        (*made.pieces, *m.state(0).optimizer), (*state.pieces, *state.optimizer), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    after = [merged(one, 0, near(0, [3]), [(2, 100)], learners=[0]) for one in (m, other)]
    for ours, theirs in zip(after[0].pieces, after[1].pieces, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(before, copies, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg="a merge wrote into what an earlier one returned")


def test_after_a_new_start_learners_are_judged_as_if_for_the_first_time():
    m = model()
    for _ in range(3):
        merged(m, 0, [*near(0, [1, 2, 3]), *near(0, [4], scale=1e4)], [(2, 100)] * 4, learners=[0, 1, 2, 3])
    honest = near(1, [1, 2, 3, 4])
    assert merged(m, 1, honest, [(2, 100)] * 4, learners=[0, 1, 2, 3]).left_out == (3,)
    m.guard = m.new_guard()
    assert not merged(m, 2, near(2, [1, 2, 3, 4]), [(2, 100)] * 4, learners=[0, 1, 2, 3]).left_out


def test_an_outer_step_that_is_not_finite_is_not_taken_and_its_optimizer_begins_anew():
    m = model(optimizer="nesterov", learning_rate=3e38, momentum=0.9, guard=GuardConfig(gates=()))
    fresh, before = m.state(0), m.fragment(0)[1]
    far = [tuple(1e9 * piece for piece in pieces) for pieces in near(0, [1, 2])]
    made = merged(m, 0, far, [(2, 100)] * 2, learners=[0, 1])
    assert (made.left_out, made.empty, m.fragment(0)[0]) == ((0, 1), True, 0)
    assert {notice.why for notice in made.notices} == {"the outer step was not finite"}
    for ours, theirs in zip(made.pieces, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(m.state(0).optimizer, fresh.optimizer, strict=True):
        if not np.issubdtype(ours.dtype, np.integer):  # what counts rounds goes on
            np.testing.assert_array_equal(ours, theirs)
    merged(m, 1, near(1, [1]), [(2, 100)], learners=[0])
    assert all(np.isfinite(x).all() for x in m.parameters().values())
