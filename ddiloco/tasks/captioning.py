"""Captioning: a row is an image and a text that says what is on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.config import setting
from ddiloco.data.batches import Batches, Selection
from ddiloco.data.images import caption_length, held_out_canvases, make_canvas_batches
from ddiloco.data.settings import CanvasConfig
from ddiloco.data.tokenizers import ByteTokenizer, check_bytes
from ddiloco.tasks.task import Batch, Task
from ddiloco.training.loss import Loss, caption_loss
from ddiloco.training.sampling import write_captions


@dataclasses.dataclass(frozen=True)
class CaptionsConfig:
    """The captions of held-out images written at the end."""

    images: int = setting(6, "images to caption; 0: none", at_least=0)


class Captioning(Task):
    """Names the digits on a canvas, byte by byte; the bytes of a caption and its end count as tokens."""

    data_settings: ClassVar[type] = CanvasConfig
    sample_settings: ClassVar[type | None] = CaptionsConfig

    def check(self) -> None:
        """As in `Task`: the model needs an id for each byte, and one kernel of attention an even length."""
        check_bytes(self.model.vocab_size)
        places = self.model.num_patches + self.row_tokens
        if self.model.attention == "cudnn" and places % 2:
            raise ValueError(f"model.attention: is cudnn, but {places} patches and tokens are an odd number")

    @property
    def loss(self) -> Loss:
        """Cross-entropy of the caption; accuracy is the share that greedy decoding writes correctly."""
        return caption_loss

    @property
    def row(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image (H, W, C) uint8; inputs, targets and weights (L,) int32."""
        text = jax.ShapeDtypeStruct((self.row_tokens,), jnp.int32)
        image = jax.ShapeDtypeStruct(self._shape, jnp.uint8)
        return {"image": image, **dict.fromkeys(("inputs", "targets", "weights"), text)}

    @property
    def row_tokens(self) -> int:
        """L, the tokens of the longest caption."""
        return caption_length(self.data)

    def batches(self, shards: Sequence[int], num_shards: int, batch_size: int) -> Batches:
        """As in `Task`: canvases of each shard's images."""
        selection = Selection(shards, num_shards, batch_size, self.seed)
        return make_canvas_batches(self.data, self._shape, selection)

    def held_out(self, batch_size: int, num_batches: int) -> list[Batch]:
        """As in `Task`: canvases of the eval split's images."""
        return held_out_canvases(self.data, self._shape, batch_size, num_batches)

    @property
    def samples(self) -> bool:
        """Whether any image is asked for."""
        return self.sampling.images > 0

    def sample(self, params: Mapping[str, Any]) -> str:
        """Captions of held-out images by greedy decoding, a line each, with the truth if it differs."""
        [batch] = self.held_out(self.sampling.images, 1)
        written = self.captions(params, batch["image"])
        targets = np.where(batch["weights"], batch["targets"], ByteTokenizer.pad)
        truth = [ByteTokenizer().decode(row) for row in targets]
        return "\n".join(
            ours if ours == theirs else f"{ours} ({theirs})"
            for ours, theirs, counts in zip(written, truth, batch["weights"], strict=True)
            if counts.any()
        )

    def captions(self, params: Mapping[str, Any], image_BxHxWxC: np.ndarray) -> list[str]:
        """The caption of each image by greedy decoding."""
        tokenizer = ByteTokenizer()
        tokens_BxL = write_captions(
            self.model, dict(params), image_BxHxWxC, self.row_tokens, tokenizer.bos, tokenizer.eos
        )
        return [tokenizer.decode(row) for row in tokens_BxL]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.model.image_height, self.model.image_width, self.model.channels
