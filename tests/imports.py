"""All imports of the programs, for a process that forks them; defines no flag and makes no array."""

import contextlib
import gc
import importlib

NAMES = (
    "experiments.cli.program",
    "ddiloco.data.digits",
    "ddiloco.data.stdlib_text",
    "ddiloco.launch.supervisor",
    "ddiloco.remote.learner.process",
    "ddiloco.remote.syncer.process",
    "experiments.studies.replay.execution",
    "experiments.cli.dry_run",
    "ddiloco.run.job",
    "ddiloco.tasks.language_modelling",
    "configs.baselines",
    "experiments.cli.exit_handling",
    "experiments.studies.chaos.processes",
    "experiments.studies.figures",
    "experiments.studies.goodput.simulator",
    "experiments.studies.sweeps",
    "experiments.studies.tuning",
    "ddiloco.baselines.virtual",
    "ddiloco.local.run",
    "ddiloco.models.captioner",
    "ddiloco.run.rollback",
    "ddiloco.dashboard.sheet",
    "ddiloco.weights.initial",
    "jaxlib.mlir.dialects.mhlo",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "PIL.JpegImagePlugin",
    "ml_collections.config_flags",
    "tensorboardX",
    "tensorflow_datasets.core.data_sources.array_record",
)

for name in NAMES:
    with contextlib.suppress(ImportError):  # whoever needs it says so
        importlib.import_module(name)
gc.collect()
gc.freeze()  # else the first collection of each forked process would copy these pages
