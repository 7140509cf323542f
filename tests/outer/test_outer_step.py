"""One outer step: values, metrics, executables by shape, and untouched arguments."""

import jax
import numpy as np
import pytest

from ddiloco.arrays.host_memory import aligned, aligned_empty
from ddiloco.outer.fragments import fragment, take
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.outer.outer_step import BLOCK, OuterStep

SHAPES = {"embed/table": (60, 4), "layers/0/w": (8, 8), "layers/1/w": (8, 8), "norm/scale": (8,)}
LAYOUT = fragment(SHAPES, 2, "tensor")


def parameters(seed, scale=1.0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def float64_rda(vectors, weights):
    norms = np.array([np.linalg.norm(v) for v in vectors])
    mean = sum(w * v / n for w, v, n in zip(weights, vectors, norms, strict=True))
    return np.dot(weights, norms) * mean / np.linalg.norm(mean)


@pytest.mark.parametrize(("merge", "embeddings"), [("rda", "direct"), ("rda", "rda"), ("direct", "rda")])
def test_two_rounds_equal_the_mathematics_and_embeddings_have_a_rule_of_their_own_with_rda(merge, embeddings):
    config = OuterConfig(
        merge=merge, embeddings=embeddings, optimizer="nesterov", learning_rate=0.7, momentum=0.9
    )
    step = OuterStep(LAYOUT, config, 4)
    weights = np.array([1.0, 3.0, 4.0])
    shares = weights / 8
    for p in range(2):
        theta = take(LAYOUT, p, parameters(0))
        exact = [x.astype(np.float64) for x in theta]
        momenta = [0.0] * len(exact)
        pieces, state, spare = theta, step.init(theta), None
        for round_ in range(2):
            contributions = [take(LAYOUT, p, parameters(10 * round_ + m)) for m in (1, 2, 3)]
            offers = [step.measure(p, pieces, own) for own in contributions]
            result = step(p, pieces, state, offers, weights, spare)
            spare, (pieces, state, metrics) = (pieces if round_ else None), result[:3]
            squares = 0.0
            for i, piece in enumerate(LAYOUT.fragments[p]):
                deltas = [exact[i] - c[i] for c in contributions]
                average = sum(w * d for w, d in zip(shares, deltas, strict=True))
                rule = embeddings if merge == "rda" and piece.name.startswith("embed") else merge
                g = float64_rda(deltas, shares) if rule == "rda" else average
                squares += (g**2).sum()
                momenta[i] = 0.9 * momenta[i] + g
                exact[i] = exact[i] - 0.7 * (g + 0.9 * momenta[i])
                np.testing.assert_allclose(pieces[i], exact[i], rtol=1e-4, atol=1e-5)
            assert metrics["outer_gradient_norm"] == pytest.approx(np.sqrt(squares), rel=1e-4)


def test_each_kind_of_tensor_has_the_mean_cosine_of_its_own_pieces():
    layout = fragment(SHAPES, 1, split_large=False)
    step = OuterStep(layout, OuterConfig(merge="direct"), 3)
    theta, shares = take(layout, 0, parameters(0)), np.array([0.25, 0.25, 0.5])
    contributions = [take(layout, 0, parameters(m)) for m in (1, 2, 3)]
    offers = [step.measure(0, theta, own) for own in contributions]
    metrics = step(0, theta, step.init(theta), offers, shares).metrics
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for i, piece in enumerate(layout.fragments[0]):
        deltas = [theta[i].astype(np.float64) - own[i] for own in contributions]
        norms = np.array([np.linalg.norm(delta) for delta in deltas])
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        weights = [shares[a] * norms[a] * shares[b] * norms[b] for a, b in pairs]
        cosines = [np.vdot(deltas[a], deltas[b]) / norms[a] / norms[b] for a, b in pairs]
        found = np.average(cosines, weights=weights), shares @ norms**2
        kind = {"embed/table": "embed", "norm/scale": "norm"}.get(piece.name, "layers")
        by_kind.setdefault(kind, []).append(found)
    assert {name for name in metrics if name.startswith("cosine/")} == {f"cosine/{kind}" for kind in by_kind}
    for kind, pieces in by_kind.items():
        cosines, importance = zip(*pieces, strict=True)
        assert metrics[f"cosine/{kind}"] == pytest.approx(np.average(cosines, weights=importance), abs=1e-5)


def test_each_shape_compiles_once_a_process_for_every_quorum():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    shapes = {name: (shape[0] + 11, *shape[1:]) for name, shape in SHAPES.items()}  # no other test has them
    layout, config, slots = fragment(shapes, 2, "tensor"), OuterConfig(), 6
    step = OuterStep(layout, config, slots)
    thetas = [take(layout, p, parameters(0, shapes=shapes)) for p in range(2)]
    states = [step.init(theta) for theta in thetas]
    before = len(compiled)
    for p in range(2):
        step.compile(p)
    different = {shape for p in range(2) for shape in layout.piece_shapes(p)}
    after = len(compiled)
    # To measure an offer, to add several up, to step.
    assert after - before == 3 * len(different) < 3 * sum(map(len, layout.fragments))
    for quorum in (4, 1, 3, 2, 0):
        for p in range(2):
            sent = [take(layout, p, parameters(m, shapes=shapes)) for m in range(quorum)]
            offers = [step.measure(p, thetas[p], pieces) for pieces in sent]
            states[p] = step(p, thetas[p], states[p], offers, [1.0] * quorum).opt_state
    for p in range(2):
        OuterStep(layout, config, slots).compile(p)
    assert len(compiled) == after  # it is shared by all of a process


def test_absent_slots_change_nothing():
    theta = take(LAYOUT, 1, parameters(0))
    contributions = [take(LAYOUT, 1, parameters(m)) for m in (1, 2)]
    results = []
    for slots in (2, 8):
        step = OuterStep(LAYOUT, OuterConfig(), slots)
        offers = [step.measure(1, theta, own) for own in contributions]
        results.append(step(1, theta, step.init(theta), offers, [1.0, 2.0]))
    for two, eight in zip(results[0].pieces, results[1].pieces, strict=True):
        np.testing.assert_allclose(two, eight, rtol=1e-6)


def gradients_of(number, agreeing):
    """Outer gradients by learner; of every two, one is the other's opposite unless they agree."""
    drawn = [take(LAYOUT, 1, parameters(m)) for m in range(number)]
    return [
        [x if agreeing or not m % 2 else -drawn[m - 1][i] for i, x in enumerate(own)]
        for m, own in enumerate(drawn)
    ]


@pytest.mark.parametrize("agreeing", [True, False])
@pytest.mark.parametrize("number", [BLOCK, BLOCK + 2, 3 * BLOCK])
def test_a_round_of_more_offers_than_a_pass_takes_is_the_same_mathematics(number, agreeing):
    """Also where learners agree on no direction, so that the value is the direct average."""
    config = OuterConfig(merge="rda", embeddings="rda", optimizer="direct")
    step = OuterStep(LAYOUT, config, 100, of_parameters=False)
    theta = take(LAYOUT, 1, parameters(99))
    gradients = gradients_of(number, agreeing)
    weights = np.array([1.0 + agreeing * (m % 3) for m in range(number)])
    if not agreeing:
        gradients[0] = [1.001 * x for x in gradients[0]]  # of which the direct average keeps something
    offers = [step.measure(1, theta, own) for own in gradients]
    made = step(1, theta, step.init(theta), offers, weights)
    for i, piece in enumerate(made.pieces):
        vectors, shares = [own[i].astype(np.float64) for own in gradients], weights / weights.sum()
        average = sum(w * v for w, v in zip(shares, vectors, strict=True))
        expected = float64_rda(vectors, shares) if agreeing else average
        np.testing.assert_allclose(piece, theta[i] - expected, rtol=1e-4, atol=2e-6)
    assert np.abs(np.asarray(made.pieces[0]) - theta[0]).max() > 1e-5


def test_more_contributions_than_learners_are_refused():
    step = OuterStep(LAYOUT, OuterConfig(), 2)
    theta = take(LAYOUT, 0, parameters(0))
    with pytest.raises(ValueError, match="3 offers, more than 2"):
        step(0, theta, step.init(theta), [step.measure(0, theta, theta)] * 3, [1.0] * 3)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_aligned_memory_begins_at_a_cache_line_and_is_not_copied_again(shape):
    array = aligned_empty(shape)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert array.ctypes.data % 64 == 0
    assert aligned(array) is array


def test_a_misaligned_or_strided_array_is_copied_to_aligned_memory():
    memory = aligned_empty((65,))
    memory[:] = np.arange(65)
    for array in (memory[1:], memory[:64].reshape(8, 8).T):
        copy = aligned(array)
        assert copy.ctypes.data % 64 == 0
        assert copy.flags.c_contiguous
        np.testing.assert_array_equal(copy, array)
