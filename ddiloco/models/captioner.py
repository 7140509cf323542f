"""The captioner: a dense decoder over one sequence of an image's patches and then the tokens of a text.

The layers are those of `ddiloco.models.dense`. Here is what differs: how an image becomes the first part of
the sequence, and the attention mask. Suffixes as there, and: I patches, L tokens, S = I + L.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import setting
from ddiloco.models import dense, stack
from ddiloco.models.attention import masked
from ddiloco.models.model import Model, Output
from ddiloco.models.parameter import Constant, Constrain, Normal, parameter, unconstrained
from ddiloco.models.vit import PixelsConfig, normalised, patches


@dataclasses.dataclass(frozen=True)
class CaptionerConfig(dense.DenseConfig, PixelsConfig):
    """The shape of a dense decoder, and of the images that it reads."""

    image_height: int = setting(12, "of an image, pixels", at_least=1)
    image_width: int = setting(32, "of an image, pixels", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pixels("image_height", "image_width")
        if self.attention == "splash":
            raise ValueError("attention: is splash, which is for text alone, but must be auto, xla or cudnn")

    @property
    def num_patches(self) -> int:
        """I, patches of an image."""
        return (self.image_height // self.patch_size) * (self.image_width // self.patch_size)


class ImageEmbedding(nnx.Module):
    """A linear map of each patch, plus a learned embedding of its place on the image."""

    def __init__(self, config: CaptionerConfig, rngs: nnx.Rngs) -> None:
        c, pixels = config, config.patch_size**2 * config.channels
        self.kernel = parameter(rngs, (pixels, c.model_dim), (None, "embed"), Normal(pixels**-0.5))
        self.bias = parameter(rngs, (c.model_dim,), ("embed",), Constant(0.0))
        self.places = parameter(rngs, (c.num_patches, c.model_dim), (None, "embed"), Normal(0.5))
        self.config = config

    def __call__(self, image_BxHxWxC: jax.Array) -> jax.Array:
        c = self.config
        pixels = patches(normalised(image_BxHxWxC, c.pixel_mean, c.pixel_std), c.patch_size)
        kernel = self.kernel[...].astype(c.compute_dtype)
        mapped_BxIxD = jnp.einsum("bip,pd->bid", pixels.astype(c.compute_dtype), kernel)
        return mapped_BxIxD + (self.bias[...] + self.places[...]).astype(c.compute_dtype)


def prefix_mask(num_patches: int, length: int) -> jax.Array:
    """True (1, 1, S, S) where a query (third axis) may see a key: every patch, and no later token."""
    place_S = jnp.arange(num_patches + length)
    is_patch, not_later = place_S[None] < num_patches, place_S[None] <= place_S[:, None]
    return (is_patch | not_later)[None, None]


class Captioner(dense.Decoder):
    """The whole model: images (B, H, W, C) uint8 and token ids in, float32 logits of the next token out."""

    config: CaptionerConfig

    def __init__(self, config: CaptionerConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.embed_image = ImageEmbedding(config, rngs)

    def __call__(  # type: ignore[override]
        self, image_BxHxWxC: jax.Array, inputs_BxL: jax.Array, constrain: Constrain = unconstrained
    ) -> Output:
        """Logits (B, L, V) float32; `constrain` pins activations to the layout of their logical axes."""
        config, (rows, length) = self.config, inputs_BxL.shape
        sequence = config.num_patches + length
        positions_BxS = jnp.broadcast_to(jnp.arange(sequence), (rows, sequence))

        def caller(constrain: Constrain, positions_BxS: jax.Array) -> stack.Call:
            angles = dense.rotary_angles(positions_BxS, config.head_dim, config.rope_theta)
            mask = prefix_mask(config.num_patches, length)
            return self.call(angles, masked(config.attention, mask, constrain), constrain)

        parts = [self.embed_image(image_BxHxWxC), self.looked_up(inputs_BxL, constrain)]
        x_BxSxD = constrain(jnp.concatenate(parts, axis=1), ("batch", None, None))
        x_BxSxD, _ = stack.run(self.layers, caller, x_BxSxD, (positions_BxS,), constrain, config)
        return Output(self.logits(x_BxSxD[:, config.num_patches :], constrain))


def flops_per_token(config: CaptionerConfig, seq_len: int) -> float:
    """Floating-point operations of one training step for each of the `seq_len` tokens of a caption.

    The cost of patches and tokens, as `dense.flops_per_token` counts it, is divided by the tokens; patches
    have no logits.
    """
    c, sequence = config, config.num_patches + seq_len
    of_patch = dense.flops_per_token(c, sequence) + 6.0 * c.model_dim * (
        c.patch_size**2 * c.channels - c.vocab_size
    )
    return dense.flops_per_token(c, sequence) + of_patch * c.num_patches / seq_len


MODEL = Model(CaptionerConfig, Captioner, flops_per_token, task="captioning")
