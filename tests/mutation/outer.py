"""Mistakes in the mathematics between learners and global model."""

from tests.mutation.mutant import Mutant

MERGING = ("outer/test_merging.py", "outer/test_outer_step.py")
CODECS = ("outer/test_codecs.py",)

MUTANTS = (
    Mutant(
        "weights: steps count, not tokens a step",
        "weight = c_tokens * (c_tokens / c_steps) if c_steps else 0.0",
        "weight = c_tokens * c_steps if c_steps else 0.0",
        MERGING,
    ),
    Mutant(
        "merging: a learner that would not move does not count in the mean length",
        "(shares * norms).sum() * _inverse(length)",
        "(shares * norms).sum() / (shares * (norms > 0)).sum() * _inverse(length)",
        MERGING,
    ),
    Mutant(
        "merging: opposite directions have no fallback",
        "return ~(length > self.shortest * (scales * norms).sum())",
        "return ~(length > 0)",
        MERGING,
    ),
    Mutant(
        "merging: the degenerate case is scaled like the other",
        "return mix.merged(total, length, shares, norms, scales)",
        "return MIXES[rule].merged(total, length, shares, norms, scales)",
        MERGING,
    ),
    Mutant(
        "merging: norms of absent learners count",
        "return shares, jnp.where(shares > 0, norms, 0)  # an absent learner's norm may have overflowed",
        "return shares, norms",
        MERGING,
    ),
    Mutant(
        "outer step: embeddings are merged by direction too",
        'return config.embeddings if config.merge == "rda" and is_embedding(name) else config.merge',
        "return config.merge",
        ("outer/test_outer_step.py", "outer/test_global_model.py"),
    ),
    Mutant(
        "optimizer: Nesterov's look-ahead is left out",
        "optax.sgd(learning_rate, momentum, nesterov=True)",
        "optax.sgd(learning_rate, momentum)",
        ("outer/test_optimizer.py",),
    ),
    Mutant(
        "codecs: codes are cut, not rounded",
        "multiples = jnp.round(groups / jnp.where(used, scales, 1.0)[:, None])",
        "multiples = jnp.trunc(groups / jnp.where(used, scales, 1.0)[:, None])",
        CODECS,
    ),
    Mutant(
        "codecs: the sign of few bits is lost",
        "return jax.lax.bitcast_convert_type(high, jnp.int8)",
        "return high",
        CODECS,
    ),
    Mutant(
        "codecs: a group that is not finite becomes numbers",
        "return jnp.where(finite, scales, jnp.nan), codes.astype(jnp.int8)",
        "return jnp.where(finite, scales, 0.0), codes.astype(jnp.int8)",
        CODECS,
    ),
    Mutant(
        "encoding: error feedback keeps what was unsound",
        "sound = jnp.isfinite(jnp.sum(jnp.square(value)))",
        "sound = True",
        ("outer/test_codecs.py", "test_corruption.py", "workers/test_codecs.py"),
    ),
    Mutant(
        "fragments: no cut is finer than the mean",
        'cuts = (1, 2, 3) if split_large and strategy == "balanced" else (1,)',
        "cuts = (1,)",
        ("outer/test_fragments.py",),
    ),
    Mutant(
        "global model: values whose squares overflow are let in",
        "            if not math.isfinite(norm):",
        "            if math.isnan(norm):",
        ("outer/test_global_model.py",),
    ),
    Mutant(
        "global model: a merge of which nothing comes makes a version",
        "        return NextVersion(self.fragment(p)[1], {}, tuple(learners), notices, empty=True)\n",
        "        self._versions[p] += 1\n"
        "        return NextVersion(self.fragment(p)[1], {}, tuple(learners), notices, empty=True)\n",
        ("outer/test_global_model.py",),
    ),
)
