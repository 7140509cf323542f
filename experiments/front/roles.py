"""The flags that a run's processes share."""

from __future__ import annotations

import pathlib

from absl import command_name, flags

from experiments.front import cli


def define_security() -> None:
    """The flags --token_file and --tls."""
    flags.DEFINE_string(
        "token_file", None, "File with the join token of all, or with one for each learner (make_tokens)."
    )
    flags.DEFINE_string(
        "tls", None, "Folder with ca.pem, cert.pem and key.pem (scripts/make_certs.sh), for mutual TLS."
    )


def define_resume() -> flags.FlagHolder:
    """The flag --resume, with or without a value: true, false or auto."""
    parser = flags.EnumParser(["true", "false", "auto"], case_sensitive=False)
    meaning = (
        "Go on with the run in the workdir. auto: if one has begun there, else begin one: "
        "for a first start and restarts alike."
    )
    return flags.DEFINE(parser, "resume", "false", meaning, boolean=True)


def define_profile() -> flags.FlagHolder:
    """The flag --profile."""
    meaning = "FIRST:LAST steps, from 2 on, of which jax.profiler writes a trace under the workdir."
    return flags.DEFINE_string("profile", None, meaning)


def profile(steps: str | None, workdir: pathlib.Path | None):
    """The StepProfile of `FIRST:LAST`; None of None.

    Raises:
      UsageError: these are no steps.
    """
    if steps is None or workdir is None:
        return None
    from ddiloco.observe.profile import FOLDER, StepProfile

    first, _, last = steps.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last)):
        raise cli.UsageError(f"profile: is {steps!r}, but must be FIRST:LAST, steps from 2 on, such as 20:24")
    return StepProfile(workdir / FOLDER, int(first), int(last), cli.tell)


def security():
    """The Security that the flags name."""
    from experiments.front.credentials import load_security

    return load_security(flags.FLAGS.token_file, flags.FLAGS.tls)


def name_process(name: str) -> None:
    """What `ps` and `top` list this process as; forked ones have the command line of the fork server."""
    command_name.set_kernel_process_name(name)
