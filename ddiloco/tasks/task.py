"""The task of a run: what a row is, where rows come from, the loss, and what is shown at the end."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ddiloco.models import model_of
from ddiloco.training.loss import Loss

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A task with its settings. Making one reads no data, so that a dry run can ask for shapes.

    Each row holds `weights`, int32: 1 for a target that counts, else 0. Their sum over a batch is the batch's
    number of tokens, in every task: a classified image counts as one token.
    """

    data_settings: ClassVar[type]
    """The dataclass of `config.data`."""
    sample_settings: ClassVar[type | None] = None
    """The dataclass of `config.sample`, what is shown at the end; None: there is nothing to show."""

    model: Any
    """Settings of the model."""
    data: Any
    """Of the class `data_settings`."""
    sampling: Any
    """Of the class `sample_settings`, or None."""
    seed: int
    """Of the order of the data, and of sampling."""

    def check(self) -> None:  # noqa: B027 (a task may have nothing to check)
        """Reads nothing; raises ValueError, which names the field, if settings do not fit each other."""

    @property
    @abc.abstractmethod
    def loss(self) -> Loss:
        """The loss."""

    @property
    @abc.abstractmethod
    def row(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of one row."""

    @property
    @abc.abstractmethod
    def row_tokens(self) -> int:
        """Number of counted targets of a full row."""

    def step_flops(self, rows: int) -> float:
        """Floating-point operations of a step on so many rows, by the model's own formula."""
        length = self.row_tokens
        return model_of(self.model).flops_per_token(self.model, length) * rows * length

    @abc.abstractmethod
    def batches(self, shards: Sequence[int], num_shards: int, batch_size: int) -> Iterator[Batch]:
        """The endless training batches of some of `num_shards` shards, `batch_size` rows of host arrays each.

        A batch has equally many rows of each shard. The iterator's `get_state` and `set_state` resume it
        exactly.

        Raises:
          ConfigError: settings do not fit the data, or the number of rows the number of shards.
          DataError: the data set cannot be opened, or has fewer records than shards.
        """

    @abc.abstractmethod
    def held_out(self, batch_size: int, num_batches: int) -> list[Batch]:
        """The held-out batches, the same for every run on these data; raises as `batches` does."""

    def warnings(self) -> Sequence[str]:
        """What may be wrong with the data, a sentence each, as an alarm says it when a run starts."""
        return ()

    @property
    def samples(self) -> bool:
        """Whether there is something to show."""
        return False

    def sample(self, params: Mapping[str, Any]) -> str | None:
        """The model's output for unseen data, for people, of a task that `samples`."""
        del params
        return None
