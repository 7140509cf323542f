"""The task of a run: what a row is, where rows come from, what is scored, and what is shown at the end."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ddiloco.training.loss import Loss

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """One task with its settings; making it reads nothing, so that a dry run can ask for the shapes.

    Each row holds `weights`, int32: 1 for a target that counts, else 0. Their sum over a batch is what is
    counted as its tokens, whatever the task: of images that are classified, one each.
    """

    data_settings: ClassVar[type]
    """Of `config.data`: which data are read, and how they become rows."""
    sample_settings: ClassVar[type | None] = None
    """Of `config.sample`: what is shown at the end; None: nothing ever is."""

    model: Any
    """Settings of the model."""
    data: Any
    """Settings of the class `data_settings`."""
    sampling: Any
    """Settings of the class `sample_settings`, or None."""
    seed: int
    """Of the order of the data and of what is shown."""

    def check(self) -> None:  # noqa: B027 (a task may have nothing to check)
        """Checks that the settings fit each other, without reading anything.

        Raises:
          ValueError: they do not; the message names the field under `config`.
        """

    @property
    @abc.abstractmethod
    def loss(self) -> Loss:
        """What is minimised, and counted, of a batch."""

    @property
    @abc.abstractmethod
    def row(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of one row."""

    @property
    @abc.abstractmethod
    def row_tokens(self) -> int:
        """The tokens of a full row, those that count for the loss."""

    @abc.abstractmethod
    def batches(self, shards: Sequence[int], num_shards: int, batch_size: int) -> Iterator[Batch]:
        """The endless training batches of some of `num_shards` shards, `batch_size` rows of host arrays each.

        Of each shard as many rows, in turn. The iterator's `get_state` and `set_state` resume it exactly.

        Raises:
          ConfigError: settings do not fit what is found, or the rows the shards.
          DataError: the data set cannot be opened, or has too little for so many shards.
        """

    @abc.abstractmethod
    def held_out(self, batch_size: int, num_batches: int) -> list[Batch]:
        """The held-out batches, the same for every run on this data; raises as `batches` does."""

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """What the model makes of something unseen, to look at; None where there is nothing to show."""
        del params
        return None
