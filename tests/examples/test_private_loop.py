"""The private loop: what its accountant says, what its batches are, and that noise and clipping are there."""

import math

import jax
import numpy as np
import pytest
from scipy import stats

import ddiloco

pytest.importorskip("jax_privacy", reason="needs the extra `privacy`")

from experiments.examples import private_loop


def epsilon_by_integral(noise, share, steps, delta):
    """Epsilon of Poisson-sampled Gaussian steps, by FFT of the loss's distribution over a fine grid.

    The larger of both directions, of adding a row and of removing it.
    """
    width, half = 2e-4, 1 << 17
    worst = 0.0
    for sign in (1, -1):
        x = np.linspace(-10 * noise - 1, 10 * noise + 2, 2_000_001)
        none, other = stats.norm.cdf(x, 0, noise), stats.norm.cdf(x, 1, noise)
        mixed, plain = np.diff((1 - share) * none + share * other), np.diff(none)
        at = (x[1:] + x[:-1]) / 2
        loss = np.log1p(share * np.expm1((2 * at - 1) / (2 * noise**2)))
        mass, loss = (mixed, loss) if sign == 1 else (plain, -loss)
        cells = np.bincount(
            np.clip(np.rint(loss / width).astype(int) + half, 0, 2 * half - 1), mass, 2 * half
        )
        composed = np.fft.irfft(np.fft.rfft(np.roll(cells, -half)) ** steps, 2 * half)
        losses = np.roll(composed, half)
        grid = width * np.arange(-half, half)
        below, above = 0.0, 30.0
        for _ in range(50):
            middle = (below + above) / 2
            over = grid > middle
            small = np.sum(losses[over] * -np.expm1(middle - grid[over])) <= delta
            below, above = (below, middle) if small else (middle, above)
        worst = max(worst, above)
    return worst


@pytest.mark.parametrize(("noise", "share", "steps"), [(1.0, 0.1, 100), (0.8, 0.05, 480)])
def test_two_accountants_agree_to_a_hundredth(noise, share, steps):
    ours = private_loop.epsilon_of(noise, share, steps, 1e-5)
    assert ours == pytest.approx(epsilon_by_integral(noise, share, steps, 1e-5), rel=0.01)


def test_the_noise_is_the_least_for_its_epsilon():
    noise = private_loop.noise_of(8.0, 0.09, 480)
    assert private_loop.epsilon_of(noise, 0.09, 480) <= 8.0
    assert private_loop.epsilon_of(noise * 0.98, 0.09, 480) > 8.0
    assert private_loop.noise_of(math.inf, 0.09, 480) == 0.0


@pytest.fixture(scope="module")
def loop():
    place = ddiloco.Place(1, 4, 0, jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    return private_loop.make_loop(place)


def test_batches_are_poisson_samples_with_keys_of_their_own(loop):
    batches = loop.batches()
    drawn = [next(batches) for _ in range(60)]
    sizes = [int((~batch["padding"]).sum()) for batch in drawn]
    assert len(set(sizes)) > 5
    assert 32 - 6 < np.mean(sizes) < 32 + 6
    assert len({batch["key"].tobytes() for batch in drawn}) == 60
    assert {loop.tokens(batch) for batch in drawn} == {32}
    epsilons = [float(batch["epsilon"]) for batch in drawn]
    assert epsilons == sorted(epsilons) and 0 < epsilons[0] < epsilons[-1] < 8.0
    assert next(loop.batches())["x"].tobytes() != drawn[0]["x"].tobytes()
    again = loop.batches()
    again.set_state(batches.get_state())
    assert again.get_state() == {"drawn": 60}
    for _ in range(480 - 60):
        last = next(again)
    assert 7.5 < last["epsilon"] <= 8.0


def moments(loop, state, batch):
    """Adam's first moment after one step, a vector: a tenth of the noised mean gradient."""
    return np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves(loop.step(state, batch)[0]["optimizer"][0].mu)]
    )


def test_no_image_moves_the_sum_further_than_the_noise_covers(loop):
    state, batch = loop.init(), next(loop.batches())
    first = moments(loop, state, batch)
    x = batch["x"].copy()
    x[0] = 1e6  # an image of which the gradient is as large as it likes
    assert 0 < np.linalg.norm(moments(loop, state, {**batch, "x": x}) - first) <= 2.001 * 0.1 / 32
    noise = moments(loop, state, {**batch, "key": batch["key"] + 1}) - first
    wanted = private_loop.noise_of(8.0, 32 / 350, 480) * math.sqrt(2) * 0.1 / 32
    assert np.std(noise) == pytest.approx(wanted, rel=0.1)


def test_a_run_reports_its_epsilon(loop, tmp_path):
    settings = {"steps": 24, "canaries": 20}
    sync = {"num_fragments": 2, "interval": 6}
    trained = ddiloco.train(
        private_loop.make_loop, tmp_path, learners=2, steps=24, driver="virtual", settings=settings, sync=sync
    )
    epsilons = trained.summary["epsilon_by_learner"]
    assert set(epsilons) == {"0", "1"}
    assert 7.5 < trained.summary["epsilon"] == max(epsilons.values()) <= 8.0
    assert private_loop.attacked(trained.params, 20, seed=0) <= trained.summary["epsilon"]
