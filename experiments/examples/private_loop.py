"""A training loop with differential privacy (DP-SGD): a small network that learns little of any one image.

    pip install 'ddiloco[privacy]'
    python -m experiments.examples.private_loop

trains with epsilon 8 and without, and attacks both. Each learner draws Poisson batches of its own images,
clips each image's gradient and adds noise. All that it sends follows from these sums, so that merging adds
nothing to epsilon; no image is on two learners, so that the run's epsilon is the largest of theirs. But all
that leaves the loop counts: the loss is that of public images, and the weight `tokens` the expected batch.
Noise and samples are from the system's randomness, not from `seed`.
"""

import functools
import math
import secrets

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from dp_accounting import pld
from jax_privacy.auditing import CanaryScoreAuditor
from jax_privacy.batch_selection import CyclicPoissonSampling, split_and_pad_global_batch
from jax_privacy.noise_addition import gaussian_privatizer
from sklearn.datasets import load_digits

import ddiloco

TRAINED, BATCH, ROOM, WIDTH = 1400, 32, 128, 32  # ROOM: of a batch; more were drawn in one of 1e40
DELTA = 1e-4  # below one over the images of a learner
# Ten times as coarse as by default, and as much faster; what is lost only adds to epsilon
ACCOUNTANT = functools.partial(pld.PLDAccountant, value_discretization_interval=1e-3)


def event(noise: float, share: float, steps: int) -> dp_accounting.DpEvent:
    """So many steps, each with a Poisson sample of this share, and noise of so many clipping norms."""
    step = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(step, steps)


@functools.cache
def epsilon_of(noise: float, share: float, steps: int, delta: float = DELTA) -> float:
    """The epsilon of these steps, by their privacy loss distribution: an upper bound that is tight."""
    if noise == 0:
        return math.inf
    return ACCOUNTANT().compose(event(noise, share, steps)).get_epsilon(delta)


@functools.cache
def noise_of(epsilon: float, share: float, steps: int, delta: float = DELTA) -> float:
    """The least noise, in clipping norms, with which these steps have this epsilon; 0 for infinity."""
    if epsilon == math.inf:
        return 0.0
    make = functools.partial(event, share=share, steps=steps)
    bracket = dp_accounting.ExplicitBracketInterval(0.3, 30.0)
    return dp_accounting.calibrate_dp_mechanism(ACCOUNTANT, make, epsilon, delta, bracket, tol=1e-3)


def images(canaries: int, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Images to train on and others, (n, 64) with a label each; which of the canaries are among the former.

    Canaries are noise with a random label, which nothing but memory can know; the last of the others are all
    of them. A coin decides of each whether it is trained on.
    """
    random = np.random.default_rng(seed)
    x, label = load_digits(return_X_y=True)
    order = random.permutation(len(x))
    x, label = (x[order] / 16.0).astype(np.float32), label[order]
    odd = random.uniform(0, 1, (canaries, 64)).astype(np.float32), random.integers(0, 10, canaries)
    chosen = random.random(canaries) < 0.5
    trained = {"x": np.concatenate([x[:TRAINED], odd[0][chosen]])}
    trained["label"] = np.concatenate([label[:TRAINED], odd[1][chosen]])
    others = {"x": np.concatenate([x[TRAINED:], odd[0]]), "label": np.concatenate([label[TRAINED:], odd[1]])}
    return trained, others, chosen


def losses_of(params: dict, batch: dict) -> jax.Array:
    """The loss of each image, (n,)."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["out"]["w"] + params["out"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def make_loop(
    place: ddiloco.Place,
    epsilon: float | None = 8.0,
    steps: int = 480,
    canaries: int = 0,
    clip: float = 1.0,
    rate: float = 0.02,
) -> ddiloco.Loop:
    """`epsilon`: of `steps` steps of a learner; None: clipped, but without noise."""
    trained, others, _ = images(canaries, place.seed)
    public = {name: values[: len(values) - canaries] for name, values in others.items()}
    own = {name: values[place.learner :: place.num_learners] for name, values in trained.items()}
    count = len(own["x"])
    share = BATCH / count
    noise = noise_of(math.inf if epsilon is None else epsilon, share, steps)
    optimizer = optax.adam(rate)
    clipped = jax_privacy.clipped_grad(
        lambda params, batch: losses_of(params, batch).mean(), l2_clip_norm=clip, rescale_to_unit_norm=True
    )

    def init():
        first, second = jax.random.split(jax.random.key(place.seed))
        params = {
            "hidden": {"w": jax.random.normal(first, (64, WIDTH)) / 8, "b": jnp.zeros(WIDTH)},
            "out": {"w": jax.random.normal(second, (WIDTH, 10)) / WIDTH**0.5, "b": jnp.zeros(10)},
        }
        return {"params": params, "optimizer": optimizer.init(params)}

    @jax.jit
    def step(state, batch):
        params = state["params"]
        data = {"x": batch["x"], "label": batch["label"]}
        gradient = clipped(params, data, is_padding_example=batch["padding"])
        if noise:
            privatizer = gaussian_privatizer(stddev=noise, prng_key=jax.random.wrap_key_data(batch["key"]))
            gradient, _ = privatizer.update(gradient, privatizer.init(params))
        mean = jax.tree.map(lambda g: g / BATCH, gradient)  # not by the batch's size, which is private too
        updates, moments = optimizer.update(mean, state["optimizer"])
        # Of public images: the loss of its own would reveal them to all who see the run's records.
        metrics = {"loss": losses_of(params, public).mean()}
        if noise:
            metrics["epsilon"] = batch["epsilon"]
        return {"params": optax.apply_updates(params, updates), "optimizer": moments}, metrics

    return ddiloco.Loop(
        init,
        step,
        lambda: PoissonBatches(own, noise, share, steps),
        params=lambda state: state["params"],
        tokens=lambda batch: BATCH,
        evaluate=lambda params: losses_of(params, public).mean(),
    )


class PoissonBatches:
    """Poisson samples with fresh noise keys, from the system's own randomness: the run's seed is no secret.

    So a run is not replayed to the same bits. Its position counts what was drawn, for epsilon.
    """

    def __init__(self, own: dict[str, np.ndarray], noise: float, share: float, steps: int) -> None:
        self._own, self._epsilon = own, functools.partial(epsilon_of, noise, share)
        self._random = np.random.default_rng(secrets.randbits(128))
        self._share, self._every, self._drawn = share, max(1, steps // 16), 0

    def __iter__(self) -> "PoissonBatches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self._drawn += 1
        sampling = CyclicPoissonSampling(self._share, 1)
        (sample,) = sampling.batch_iterator(len(self._own["x"]), self._random)
        (indices,) = split_and_pad_global_batch(sample, ROOM)
        counted = -(-self._drawn // self._every) * self._every  # rounded up, as epsilon takes a moment
        return {
            "x": self._own["x"][indices],
            "label": self._own["label"][indices].astype(np.int32),
            "padding": indices < 0,
            "key": np.frombuffer(secrets.token_bytes(8), np.uint32),
            "epsilon": np.float32(self._epsilon(counted)),
        }

    def get_state(self) -> dict[str, int]:
        """The number of batches drawn."""
        return {"drawn": self._drawn}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on counting; what was drawn and lost in between counts, too, where its work was sent."""
        self._drawn = max(self._drawn, state["drawn"])


def attacked(params: dict, canaries: int, seed: int) -> float:
    """The epsilon that an attack proves with 95% confidence: it guesses by its loss who was trained on."""
    _, others, chosen = images(canaries, seed)
    scores = -np.asarray(losses_of(params, {name: values[-canaries:] for name, values in others.items()}))
    return CanaryScoreAuditor(scores[chosen], scores[~chosen]).epsilon_one_run(0.05, DELTA)


if __name__ == "__main__":
    sync, canaries = {"num_fragments": 2, "interval": 12}, 200
    for epsilon in (8.0, None):
        settings = {"epsilon": epsilon, "canaries": canaries}
        trained = ddiloco.train(make_loop, "runs/private_loop", learners=4, settings=settings, sync=sync)
        bound, loss = trained.summary.get("epsilon", math.inf), trained.summary["eval_loss"]
        found = attacked(trained.params, canaries, seed=0)
        print(f"epsilon {bound:.2f}, an attack shows {found:.2f}; held-out loss {loss:.3f}")
