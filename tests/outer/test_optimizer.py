"""Outer optimizers against recurrences written out by hand in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError, build
from ddiloco.outer.optimizer import OuterConfig, make_outer_optimizer
from tests.refusals import refusal

RATE, MU, EVERY = 0.3, 0.8, 3


def stream(steps=6, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((3, 2)), rng.standard_normal(4)) for _ in range(steps)]


def run(config, gradients):
    """Updates and states of the optimizer, leaf after leaf as one float64 vector a step."""
    optimizer = make_outer_optimizer(config)
    gradients = [tuple(jnp.asarray(x, jnp.float32) for x in g) for g in gradients]
    params = jax.tree.map(jnp.zeros_like, gradients[0])
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    updates, states = [], []
    for gradient in gradients:
        change, state = update(gradient, state, params)
        updates.append(flat(change))
        states.append(state)
    return updates, states


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in tree])


def nesterov(gradients):
    momentum = 0
    for g in gradients:
        momentum = MU * momentum + g
        yield -RATE * (g + MU * momentum)


def adam(gradients):
    m = v = 0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        yield -RATE * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def delayed(gradients):
    momentum = total = 0
    for t, g in enumerate(gradients, start=1):
        total, step = total + g, g
        if t % EVERY == 0:
            momentum, total = MU * momentum + total, 0
            step = g + MU * momentum
        yield -RATE * step


def corrected(g, m):
    """arXiv 2606.00271: shrunk along the momentum where against it, turned where the two hardly agree."""
    length, other = np.linalg.norm(g), np.linalg.norm(m)
    if not length * other:
        return g
    u, v = g / length, m / other
    c, confidence = u @ v, length / (length + other)
    if c >= 0.2:
        return g
    if c < 0:
        return g - min(-c * confidence, 1) * c * length * v
    turned = u + (1 - c) * confidence / 2 * (v - u)
    return length * turned / np.linalg.norm(turned)


def towards_momentum(gradients):
    parts = np.split(np.zeros(10), [6])  # of `stream`, whose tensors have 6 and 4 elements
    for gradient in gradients:
        found = []
        for i, g in enumerate(np.split(gradient, [6])):
            g = corrected(g, parts[i])
            parts[i] = MU * parts[i] + (1 - MU) * g
            found.append(-RATE * (g + MU * parts[i]))
        yield np.concatenate(found)


FORMULAS = {
    "nesterov": nesterov,
    "delayed_nesterov": delayed,
    "heloco": towards_momentum,
    "direct": lambda gradients: (-g for g in gradients),
    "adam": adam,
}


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_updates_follow_the_recurrence(name):
    config = OuterConfig(optimizer=name, learning_rate=RATE, momentum=MU, momentum_every=EVERY)
    gradients = stream(20)
    updates, _ = run(config, gradients)
    for got, want in zip(updates, FORMULAS[name]([flat(g) for g in gradients]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_the_stream_meets_every_case_of_heloco():
    momentum, cosines = np.zeros(6), []
    for g in (flat(g)[:6] for g in stream(20)):
        if momentum.any():
            cosines.append(g @ momentum / np.linalg.norm(g) / np.linalg.norm(momentum))
        momentum = MU * momentum + (1 - MU) * corrected(g, momentum)
    assert min(cosines) < -0.1
    assert any(0 < c < 0.2 for c in cosines)
    assert max(cosines) > 0.3


@pytest.mark.parametrize("name", sorted(FORMULAS.keys() - {"direct"}))
def test_the_rate_goes_to_its_last_value_in_a_straight_line_and_stays(name):
    steady = OuterConfig(optimizer=name, learning_rate=0.5, momentum=MU)
    moving = dataclasses.replace(steady, rate_rounds=4, final_rate=0.9)
    ratios = zip(run(moving, stream())[0], run(steady, stream())[0], strict=True)
    for (got, unscaled), rate in zip(ratios, [0.5, 0.6, 0.7, 0.8, 0.9, 0.9], strict=True):
        np.testing.assert_allclose(got, unscaled * rate / 0.5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_settings_that_change_no_update_are_known(name):
    config = OuterConfig(optimizer=name)
    before = run(config, stream())[0]
    others = {"learning_rate": 0.1, "momentum": 0.9, "momentum_every": 2, "final_rate": 0.2}
    after = {
        name: run(dataclasses.replace(config, **{name: value}), stream())[0] for name, value in others.items()
    }
    assert {
        name for name in others if np.array_equal(before, after[name])
    } == config.idle.keys() & others.keys()


@pytest.mark.parametrize("name", ["nadamm", "chain", "_src", "adaptive_grad_clip"])
def test_an_optimizer_that_is_none_is_refused_in_one_line_that_names_the_field(name):
    assert refusal(ConfigError, build, OuterConfig, {"optimizer": name}).startswith(
        f"config.optimizer: is {name!r}, but must be one of nesterov, direct,"
    )


@pytest.mark.parametrize(("name", "rounds"), [("lbfgs", 0), ("noisy_sgd", 0), ("rprop", 3), ("sm3", 3)])
def test_an_optimizer_that_cannot_step_from_merged_gradients_is_refused_in_one_line(name, rounds):
    with pytest.raises(ConfigError, match=rf"^config\.optimizer: {name} cannot step from merged .*: .+$"):
        build(OuterConfig, {"optimizer": name, "rate_rounds": rounds})


def test_a_schedule_of_a_rate_that_is_not_used_is_refused():
    with pytest.raises(ConfigError, match=r"^config\.rate_rounds: is 9, but direct has no outer rate"):
        build(OuterConfig, {"optimizer": "direct", "rate_rounds": 9})


@pytest.mark.parametrize(
    "values",
    [{"merge": "mean"}, {"momentum": 1.0}, {"learning_rate": 0.0}],
)
def test_settings_outside_their_bounds_are_refused(values):
    with pytest.raises(ConfigError, match=rf"^config\.{next(iter(values))}: "):
        build(OuterConfig, values)
