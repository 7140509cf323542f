"""The flags that a run's processes share."""

from __future__ import annotations

from absl import command_name, flags


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


def security():
    """The Security that the flags name."""
    from experiments.front.credentials import load_security

    return load_security(flags.FLAGS.token_file, flags.FLAGS.tls)


def name_process(name: str) -> None:
    """What `ps` and `top` list this process as; forked ones have the command line of the fork server."""
    command_name.set_kernel_process_name(name)
