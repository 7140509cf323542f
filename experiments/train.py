"""Trains a model: `python -m experiments.train --config=configs/dense.py[:preset] --workdir=DIR`."""

from __future__ import annotations

import signal

from absl import flags

from experiments.cli import exit_handling, program, roles

_CONFIG = program.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_SETTINGS = flags.DEFINE_bool("settings", False, "Only list every setting: value, meaning and bounds.")
_PROFILE = roles.define_profile()
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only say what the run would be; allocates no parameters.")


def main(_) -> int:
    from ddiloco.run.job import run_job
    from ddiloco.telemetry import json_lines
    from ddiloco.training import platform

    experiment = _CONFIG.experiment()
    only = "settings" if _SETTINGS.value else "dry_run" if _DRY_RUN.value else None
    if only is not None:  # with --workdir they are a run's command line, and one word more
        program.refuse_flags({"settings", "dry_run", "profile"} - {only}, f"has no use with --{only}")
    if _SETTINGS.value:
        from experiments.cli.listing import listing

        print(listing(experiment))
        return 0
    if _DRY_RUN.value:
        from experiments.cli.dry_run import describe

        print(describe(experiment))
        return 0
    if experiment.driver != "remote":
        platform.prepare()
    workdir = program.writable_folder("workdir", _WORKDIR.value or exit_handling.new_workdir())
    if experiment.log.json:
        json_lines.speak_json(run=workdir.name, role="launcher" if experiment.driver == "remote" else "all")
    profile = roles.profile(_PROFILE.value, workdir)
    stop, received = exit_handling.stop_on_signals(saving=f"saving model and summary in {workdir}")
    if experiment.driver == "remote":
        from ddiloco.launch.all_roles import run_all

        steps = None if profile is None else _PROFILE.value
        code = run_all(
            experiment, program.config_arguments(), workdir, stop, program.print_err, profile=steps
        )
        return 128 + received[0] if received and code in (0, 128 + signal.SIGTERM) else code
    result = run_job(experiment, workdir, stop, profile=profile)
    return exit_handling.print_result(result, workdir, received)


if __name__ == "__main__":
    program.run(main)
