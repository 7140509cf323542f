"""Trains a model: `python -m experiments.train --config=configs/dense.py[:preset] --workdir=DIR`."""

from __future__ import annotations

import signal
import sys

from absl import flags

from experiments.cli import exit_handling, program, roles

_CONFIG = program.define_config("configs/dense.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_SETTINGS = flags.DEFINE_bool("settings", False, "Only list every setting: value, meaning and bounds.")
_RESUME = roles.define_resume()
_PROFILE = roles.define_profile()
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only print the needs of the run; allocates no parameters.")


def main(_) -> int:
    experiment = _CONFIG.experiment()  # first: a mistake in it is told before all else is imported
    from ddiloco.run.job import Hooks, run_job
    from ddiloco.run.recipes import with_steps_of_budget
    from ddiloco.run.rollback import going_on
    from ddiloco.storage import run_mark
    from ddiloco.storage.durable import FOLDER, DurableStateError
    from ddiloco.telemetry import json_lines
    from ddiloco.telemetry.run_files import is_over
    from ddiloco.training import platform

    only = "settings" if _SETTINGS.value else "dry_run" if _DRY_RUN.value else None
    if only is not None:  # with --workdir they are a run's command line, and one word more
        program.refuse_flags(
            {"settings", "dry_run", "profile", "resume"} - {only}, f"has no use with --{only}"
        )
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
    profile, resume = roles.profile(_PROFILE.value, workdir), roles.resumes()
    if resume is None and is_over(workdir, with_steps_of_budget(experiment).train.steps):
        program.print_err(f"the run in {workdir} is over")
        return 0
    stop, received = exit_handling.stop_on_signals(saving=f"saving model and summary in {workdir}")
    resume = going_on(resume, workdir, experiment, program.print_err)
    if experiment.driver == "remote":
        from ddiloco.launch.supervisor import run_all

        steps = None if profile is None else _PROFILE.value
        resume = resume or (resume is None and run_mark.begun(workdir / FOLDER) is not None)
        settings = program.config_arguments()
        code = run_all(experiment, settings, workdir, stop, program.print_err, profile=steps, resume=resume)
        return 128 + received[0] if received and code in (0, 128 + signal.SIGTERM) else code
    hooks = Hooks(profile=profile, comes_back=lambda: exit_handling.comes_back(resume, received))
    try:
        result = run_job(experiment, workdir, stop, resume=resume, hooks=hooks)
    except (DurableStateError, run_mark.RunMarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return exit_handling.print_result(result, workdir, received)


if __name__ == "__main__":
    program.run(main)
