"""Classification: a row is a labelled image, which counts as one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from ddiloco.data.batches import Batches, Selection
from ddiloco.data.images import held_out_images, make_image_batches
from ddiloco.data.settings import ClassificationConfig
from ddiloco.tasks.task import Batch, Task
from ddiloco.training.loss import Loss, label_loss


class Classification(Task):
    """Predicts the class of an image; the model sets size, channels and number of classes."""

    data_settings: ClassVar[type] = ClassificationConfig

    @property
    def loss(self) -> Loss:
        """Cross-entropy of the label, and accuracy."""
        return label_loss

    @property
    def row(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image (H, W, C) uint8, its label and its weight, int32."""
        size, scalar = self.model.image_size, jax.ShapeDtypeStruct((), jnp.int32)
        image = jax.ShapeDtypeStruct((size, size, self.model.channels), jnp.uint8)
        return {"image": image, "label": scalar, "weights": scalar}

    @property
    def row_tokens(self) -> int:
        """One: an image counts as one token."""
        return 1

    def batches(self, shards: Sequence[int], num_shards: int, batch_size: int) -> Batches:
        """As in `Task`: augmented images of each shard."""
        m = self.model
        selection = Selection(shards, num_shards, batch_size, self.seed)
        return make_image_batches(self.data, m.image_size, m.channels, m.num_classes, selection)

    def held_out(self, batch_size: int, num_batches: int) -> list[Batch]:
        """As in `Task`: images evenly spaced over the eval split."""
        m = self.model
        return held_out_images(self.data, m.image_size, m.channels, m.num_classes, batch_size, num_batches)
