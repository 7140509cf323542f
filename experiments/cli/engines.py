"""Flags that only some engines have a use for: their meaning begins with the engines' names and a colon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from absl import flags

from experiments.cli import program

PASSED_ON = ("JAX_", "LIBTPU_", "TFDS_", "XLA_")  # variables that processes elsewhere have from this one


def refuse_others(
    engine: str, engines: Sequence[str], instead: Mapping[tuple[str, str], str] | None = None
) -> None:
    """Raises UsageError for a flag of the command line that this engine has no use for.

    `instead`: by flag and engine, what to do in the flag's place.
    """
    for name in flags.FLAGS:
        those, colon, _ = flags.FLAGS[name].help.partition(":")
        of = those.split(", ")
        if colon and set(of) <= set(engines) and engine not in of:
            why = (instead or {}).get((name, engine), f"it is for {', '.join(of)}")
            program.refuse_flags([name], f"has no use with --launcher={engine}; {why}")
