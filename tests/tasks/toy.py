"""A model as small as one can be, whole in this file as it would be in ddiloco/models/toy.py."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models import Model
from ddiloco.models.parameter import Constrain, Normal, parameter, unconstrained


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """The shape of a toy: the next token is foretold from this one alone."""

    vocab_size: int = setting(259, "tokens in the vocabulary", at_least=2)
    width: int = setting(8, "numbers that stand for a token", at_least=1)


class Toy(nnx.Module):
    """Token ids in, float32 logits of the next token out."""

    def __init__(self, config: ToyConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.width)
        self.embed = parameter(rngs, shape, ("vocab", "embed"), Normal(1.0))
        self.head = parameter(rngs, shape[::-1], ("embed", "vocab"), Normal(config.width**-0.5))

    def __call__(
        self,
        inputs_BxL: jax.Array,
        positions_BxL: jax.Array,
        segments_BxL: jax.Array,
        constrain: Constrain = unconstrained,
    ) -> jax.Array:
        """Logits (B, L, V) float32."""
        logits_BxLxV = jnp.tanh(self.embed[...][inputs_BxL]) @ self.head[...]
        return constrain(logits_BxLxV, ("batch", None, "vocab"))


def flops_per_token(config: ToyConfig, seq_len: int) -> float:
    """Six for each weight of the head."""
    return 6.0 * config.width * config.vocab_size


MODEL = Model(ToyConfig, Toy, flops_per_token)
