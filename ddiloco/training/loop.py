"""A user's training loop; docs/your_own.md explains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Place:
    """A loop's devices and share of the data.

    Attributes:
      learner: its number, from 0.
      num_learners: M, the most that there may be (`remote.max_learners`); learner m of M trains on the m-th
        of M shards of the data.
      seed: of the run; the same for all learners, so that `init` gives all the same parameters.
      mesh: the learner's own devices, by the axes of `config.mesh`. A loop for one device may ignore it.
    """

    learner: int
    num_learners: int
    seed: int
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop. Its state is any pytree; the parameters are some of its leaves, all of them float32.

    Attributes:
      init: `() -> state`, the same at every call.
      step: `(state, batch) -> (state, metrics)`; the metrics are scalars by name, among them "loss", and
        "skipped", 1 or 0, if it leaves the state as it was where a gradient is not finite: such a step is no
        work. It may donate its state. It is called once on a state that is thrown away, to be compiled and
        checked.
      batches: `() -> iterator` of endless batches from their beginning. If the iterator has `get_state` and
        `set_state` (of JSON values), a learner that comes back goes on with them; else it reads and drops the
        batches that it has had.
      params: `state -> tree`, the leaves of the state that are trained together, in any tree whose paths name
        them. Names that begin with `embed` or `head` are averaged; the rest goes through the merge rule.
      tokens: `batch -> int`, by which a learner's work is weighed; None: the rows of the first array.
      evaluate: `params -> float`, the held-out loss of parameters in the tree that `params` gives; None: the
        global model is not scored.
      step_tokens: the tokens of a step, for a budget of tokens (`train.tokens`); None: there is none.
    """

    init: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: Callable[[], Iterator[Any]]
    params: Callable[[Any], Any]
    tokens: Callable[[Any], int] | None = None
    evaluate: Callable[[Any], float] | None = None
    step_tokens: int | None = None


MakeLoop = Callable[..., Loop]
"""`(place, **settings) -> Loop`. The syncer makes a loop too, as learner 0, for its `init` and `evaluate`."""
