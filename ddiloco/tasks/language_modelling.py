"""Language modelling: rows of packed text, in which each token is predicted from those before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.config import ConfigError, setting
from ddiloco.data.batches import Batches, Selection
from ddiloco.data.settings import DataConfig
from ddiloco.data.text import held_out_text, make_text_batches
from ddiloco.data.tokenizers import Tokenizer, check_bytes, make_tokenizer, without_end
from ddiloco.models import attention
from ddiloco.tasks.task import Batch, Task
from ddiloco.training.loss import Loss, next_token_loss
from ddiloco.training.sampling import sample

_ROW = ("inputs", "targets", "segments", "positions", "weights")


TEMPERATURE = 0.7  # of the sample at the end: readable, and not the same words again and again


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The continuation written at the end."""

    prompt: str = setting("def ", "text that it continues")
    tokens: int = setting(160, "tokens to write; 0: none", at_least=0)

    def __post_init__(self) -> None:
        if self.tokens and not self.prompt:
            raise ValueError("prompt: is empty, but must have something to continue, or tokens be 0")


def text_row(length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of the arrays of a row of `length` tokens, as from `ddiloco.data.text.rows`."""
    return dict.fromkeys(_ROW, jax.ShapeDtypeStruct((length,), jnp.int32))


class LanguageModelling(Task):
    """Predicts the next token of a text; a document's last token has no next one, and does not count."""

    data_settings: ClassVar[type] = DataConfig
    sample_settings: ClassVar[type | None] = SampleConfig

    def check(self) -> None:
        """As in `Task`: the model needs an id for each byte, and its attention whole blocks."""
        length, kernel = self.data.sequence_length, getattr(self.model, "attention", "auto")
        block = {"splash": attention.LANES, "cudnn": 2}.get(kernel, 1)
        if length % block:
            raise ValueError(
                f"data.sequence_length: is {length}, but must be a multiple of {block} for {kernel}"
            )
        if self.data.tokenizer == "byte":
            check_bytes(self.model.vocab_size)

    @property
    def loss(self) -> Loss:
        """Cross-entropy of the next token."""
        return next_token_loss

    @property
    def row(self) -> dict[str, jax.ShapeDtypeStruct]:
        """(L,) int32 each."""
        return text_row(self.row_tokens)

    @property
    def row_tokens(self) -> int:
        """L."""
        return self.data.sequence_length

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The configured one; raises ConfigError where it does not fit the model or what is to be written."""
        tokenizer = make_tokenizer(self.data)
        if tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"config.model.vocab_size: is {self.model.vocab_size}, "
                f"but the tokenizer has {tokenizer.vocab_size} ids"
            )
        if self.samples and not len(tokenizer.encode(self.sampling.prompt)):
            raise ConfigError(
                f"config.sample.prompt: is {self.sampling.prompt!r}, of which the tokenizer makes no token; "
                "it must have something to continue, or tokens be 0"
            )
        return tokenizer

    def batches(self, shards: Sequence[int], num_shards: int, batch_size: int) -> Batches:
        """As in `Task`: rows packed from each shard's documents."""
        selection = Selection(shards, num_shards, batch_size, self.seed)
        return make_text_batches(self.data, self.tokenizer, selection)

    def held_out(self, batch_size: int, num_batches: int) -> list[Batch]:
        """As in `Task`: rows evenly spaced over the eval split."""
        return held_out_text(self.data, self.tokenizer, batch_size, num_batches)

    def warnings(self) -> Sequence[str]:
        """As in `Task`: where documents have no end."""
        return without_end(self.data, self.tokenizer)

    @property
    def samples(self) -> bool:
        """Whether any token is asked for."""
        return self.sampling.tokens > 0

    def sample(self, params: Mapping[str, Any]) -> str:
        """A sampled continuation of the configured prompt, prompt included, to the document's end at most."""
        s = self.sampling
        prompt = self.tokenizer.encode(s.prompt)
        window = self.data.sequence_length
        tokens = sample(self.model, dict(params), prompt, s.tokens, TEMPERATURE, self.seed, window)
        ends = np.flatnonzero(tokens == self.tokenizer.eos)  # what follows was no target in training
        return s.prompt + self.tokenizer.decode(tokens[: ends[0]] if ends.size else tokens)
