"""The flags that a run's processes share; what is not given as a flag is read from the environment."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import command_name, flags

from ddiloco.config import REFUSED
from ddiloco.launch.assignment import FAILED, LEARNER, PREFIX, SYNCER, Assignment
from ddiloco.telemetry.waits import PROCESS
from experiments.cli import program

if TYPE_CHECKING:
    from ddiloco.remote.wire.management import Answer, Command


def define(define: Callable[..., flags.FlagHolder], name: str, default: Any, meaning: str, **more: Any):
    """A flag that DDILOCO_<NAME> of the environment gives where the command line does not."""
    variable = PREFIX + more.pop("variable", name).upper()
    given = os.environ.get(variable) or default
    try:
        return define(name, given, f"{meaning} Else ${variable}.", **more)
    except flags.IllegalFlagValueError as error:
        print(f"error: {variable}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(REFUSED)


def define_role() -> None:
    """The flags of every role: --health, --grace and --restarts."""
    define(flags.DEFINE_string, "health", None, "HOST:PORT for GET /live and /ready; default: nowhere.")
    define(
        flags.DEFINE_float,
        "grace",
        0.0,
        "Seconds from the order to stop to the end of the process; 0: as many as it takes.",
        lower_bound=0.0,
    )
    often = "How often this process was started before: above 0, what is refused is a failure, exit code 1."
    define(flags.DEFINE_integer, "restarts", 0, often, lower_bound=0)


def refused() -> int:
    """The exit code of what is refused: its settings have done for a process that was started before."""
    return FAILED if flags.FLAGS.restarts else REFUSED


def define_processes() -> None:
    """The flags of a learner of several processes: --process, --processes and --coordinator."""
    number, many = "Which of its processes this is, from 0.", "How many processes the learner has."
    define(flags.DEFINE_integer, "process", 0, number, lower_bound=0)
    define(flags.DEFINE_integer, "processes", 1, many, lower_bound=1)
    define(
        flags.DEFINE_string,
        "coordinator",
        "",
        "HOST:PORT of its process 0, where it has several; these also use the next port. With "
        "config.remote.min_hosts the port alone, at which each would be process 0; default: any free one.",
    )


def define_security() -> None:
    """The flags --token_file and --tls."""
    define(
        flags.DEFINE_string,
        "token_file",
        None,
        f"File with the join token of all, or with one for each learner (make_tokens); ${PREFIX}TOKEN may "
        "hold what is in the file.",
    )
    define(
        flags.DEFINE_string,
        "tls",
        None,
        "Folder with ca.pem, cert.pem and key.pem (scripts/make_certs.sh), for mutual TLS.",
    )


def assignment(role: str, **given: Any) -> Assignment:
    """This process by its flags; `given` is what the program has read itself."""
    values = flags.FLAGS
    common = {"health": values.health or "", "grace": values.grace, "refused": refused()}
    if role == LEARNER:
        common |= {name: values[name].value for name in ("process", "processes", "coordinator")}
        if common["process"] >= common["processes"]:
            raise program.UsageError(f"process: is {common['process']}, but must be below --processes")
    if role == SYNCER:
        common["resume"] = resumes()
    return Assignment(role, **common, **given)


class _ResumeParser(flags.ArgumentParser):
    """true, false, auto, or the number of a snapshot."""

    def parse(self, argument: Any) -> bool | int | None:
        text = str(argument).lower()
        if text.isdecimal() and int(text) > 0:
            return int(text)
        if text not in _RESUME:
            raise ValueError("must be true, false, auto or the number of a snapshot")
        return _RESUME[text]

    def flag_type(self) -> str:
        return "true, false, auto or a number"


_RESUME = {"true": True, "false": False, "auto": None}


def define_resume() -> flags.FlagHolder:
    """The flag --resume, with or without a value."""
    meaning = (
        "Resume the run in the workdir, from its newest state or, given its number, from a snapshot. "
        "auto: resume it if there is one, else start one: for a first start and restarts alike."
    )

    def resume(name: str, default: str, help: str) -> flags.FlagHolder:
        return flags.DEFINE(_ResumeParser(), name, default, help, boolean=True)

    return define(resume, "resume", "false", meaning)


def resumes() -> bool | int | None:
    """What --resume says; None: auto. A number: of the snapshot."""
    return flags.FLAGS.resume


def define_profile() -> flags.FlagHolder:
    """The flag --profile."""
    meaning = "FIRST:LAST steps, from 2 on, of which jax.profiler writes a trace under the workdir."
    return flags.DEFINE_string("profile", None, meaning)


def profile(steps: str | None, workdir: pathlib.Path | None):
    """The StepProfile of `FIRST:LAST`; None of None. Raises UsageError if these are no steps."""
    if steps is None or workdir is None:
        return None
    from ddiloco.telemetry.watches import PROFILE_FOLDER, StepProfile

    first, _, last = steps.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last)):
        raise program.UsageError(
            f"profile: is {steps!r}, but must be FIRST:LAST, steps from 2 on, such as 20:24"
        )
    return StepProfile(workdir / PROFILE_FOLDER, int(first), int(last), program.print_err)


def security():
    """The Security that the flags name."""
    from experiments.cli.credentials import load_security

    return load_security(flags.FLAGS.token_file, flags.FLAGS.tls, os.environ.get(f"{PREFIX}TOKEN"))


def manage(address: str, command: Command, timeout: float) -> Answer | str:
    """The answer of a process of the syncer to an operator's command, or, as a text, why there is none."""
    import grpc

    from ddiloco.remote.wire.management import ask
    from ddiloco.remote.wire.validation import WireError, cause

    try:
        return ask(address, security(), command, timeout)
    except grpc.RpcError as error:
        return cause(error)
    except WireError as error:
        return str(error)


def name_process(name: str) -> None:
    """What `ps` and `top` list this process as; forked ones have the command line of the fork server.

    Without spaces, over which programs stumble that read /proc/PID/stat: Slurm's linuxproc signals no such
    process.
    """
    PROCESS.name = name
    command_name.set_kernel_process_name(name.replace(" ", "-"))
