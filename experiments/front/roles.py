"""The flags that a run's processes share, and all of them started on this machine."""

from __future__ import annotations

import os
import pathlib
import secrets
import tempfile
import threading

from absl import command_name, flags

from experiments.front import cli


def define_security() -> None:
    """The flags --token_file and --tls."""
    flags.DEFINE_string("token_file", None, "File with the join token, the same for syncer and learners.")
    flags.DEFINE_string(
        "tls", None, "Folder with ca.pem, cert.pem and key.pem (scripts/make_certs.sh), for mutual TLS."
    )


def security():
    """The Security that the flags name."""
    from ddiloco.remote.wire.security import load_security

    return load_security(flags.FLAGS.token_file, flags.FLAGS.tls)


def name_process(name: str) -> None:
    """What `ps` and `top` list this process as; forked ones have the command line of the fork server."""
    command_name.set_kernel_process_name(name)


def run_all(
    experiment,
    config: list[str],
    workdir: pathlib.Path,
    stop: threading.Event,
    *,
    observe=lambda name, pid, code: None,
    route=lambda learner, address: address,
) -> int:
    """The processes of a run, on the loopback of this machine, with a token of their own; the exit code.

    `observe` is the supervisor's. `route` gives the HOST:PORT under which a learner reaches the syncer's.
    """
    from ddiloco.launch import processes, supervisor
    from ddiloco.launch.ports import reserved_port

    learners = experiment.sync.num_learners
    processes.warm_up()
    with tempfile.TemporaryDirectory(prefix="ddiloco-") as folder, reserved_port() as port:
        address = f"127.0.0.1:{port}"
        token = pathlib.Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        shared = [*config, f"--token_file={token}"]
        syncer = supervisor.Role(
            "the syncer",
            "experiments.syncer",
            [*shared, f"--workdir={workdir}", f"--listen={address}"],
            supervisor.syncer_environment(os.environ),
            again=["--resume"],
            alone=["--finish"],
        )
        roles = [
            supervisor.Role(
                f"learner {m}",
                "experiments.learner",
                [
                    *shared,
                    f"--syncer={route(m, address)}",
                    f"--learner_id={m}",
                    f"--workdir={workdir}",
                ],
                supervisor.learner_environment(m, learners, os.environ),
                assignment=f"{m} {route(m, address)}",
            )
            for m in range(learners)
        ]
        spares = [
            supervisor.Role(
                f"spare {n}",
                "experiments.learner",
                [*shared, "--spare", f"--workdir={workdir}"],
                supervisor.learner_environment(0, learners, os.environ),
            )
            for n in range(experiment.remote.spares)
        ]
        watched = supervisor.Supervisor(
            syncer, roles, experiment.remote, cli.tell, observe=observe, spares=spares
        )
        return watched.run(stop)
