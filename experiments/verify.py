"""Checks a run from its public log: `python -m experiments.verify --log=DIR --keys=DIR [--heads=DIR]`.

The log is the syncer's tapes with config.json; the keys are each party's NAME.pub. With learners' receipts
(--heads) all must have been sent the same history; kept offers (--offers) are merged again and compared.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

from absl import flags

from experiments.cli import program

_LOG = flags.DEFINE_string("log", None, "Folder of the run, or a copy with config.json and tape/.")
_KEYS = flags.DEFINE_string("keys", None, "Folder of public keys. Default: keys in the log.")
_OFFERS = flags.DEFINE_string("offers", None, "Folder of the run whose offers/ has kept merges.")
_HEADS = flags.DEFINE_multi_string("heads", [], "Folder of learners' receipts; may be given several times.")


def main(_) -> int:
    log_folder = pathlib.Path(program.required(_LOG))
    if not (log_folder / "config.json").exists():
        raise program.UsageError(f"log: {log_folder}: there is no run in it")
    if importlib.util.find_spec("cryptography") is None:
        raise program.UsageError("keys: need the package cryptography (pip install cryptography)")
    from ddiloco.storage.signing_keys import FOLDER, PublicKeys
    from ddiloco.storage.tape.file import TapeError
    from ddiloco.workers.tapes import fingerprint
    from experiments.studies.replay import verification
    from experiments.studies.replay.execution import recorded_experiment
    from experiments.studies.replay.reading import read_histories

    keys = PublicKeys(_folder("keys", _KEYS.value or str(log_folder / FOLDER)))
    heads = [path for folder in _HEADS.value for path in sorted(_folder("heads", folder).glob("*.jsonl"))]
    if _HEADS.value and not heads:
        raise program.UsageError(f"heads: {_HEADS.value[0]}: there are no receipts of learners in it")
    try:
        experiment = recorded_experiment(log_folder)
        log = verification.LogCheck(experiment.sync, experiment.train.steps, keys)
        for tapes, set_back in read_histories(log_folder, fingerprint(experiment)):
            log.history(tapes, set_back)
        accounts = [verification.check_heads(log, path) for path in heads]
    except (TapeError, ValueError) as error:
        sys.exit(f"error: {error}")
    merges = f"{len(log.versions)} versions and {log.signatures} signatures checked"
    if _OFFERS.value is not None:
        merges += _merge_again(experiment, log, _folder("offers", _OFFERS.value))
    print(merges)
    for account in accounts:
        offers = f"{account.arrived} of the {account.sent} offers that it signed are in the log"
        print(f"{account.learner}: {account.versions} statements on versions; {offers}")
        for claim in account.claims:
            print(f"by its own account, {claim}")
    for finding in log.findings:
        print(f"error: {finding}", file=sys.stderr)
    if not log.findings:
        print("the log is what was signed, and what the rules decide")
    return 1 if log.findings else 0


def _folder(flag: str, given: str) -> pathlib.Path:
    if not (folder := pathlib.Path(given)).is_dir():
        raise program.UsageError(f"{flag}: {folder}: there is no such folder")
    return folder


def _merge_again(experiment, log, folder: pathlib.Path) -> str:
    from ddiloco.run.recipes import assembly_of
    from ddiloco.storage.kept_offers import KeptOffers
    from ddiloco.training import platform
    from ddiloco.workers.tapes import machine_of
    from experiments.studies.replay.execution import differences
    from experiments.studies.replay.verification import TOLERANCE, MergesAgain

    platform.compute_on_cpu()
    platform.prepare()
    assembly = assembly_of(experiment)
    model = assembly.global_model(assembly.initial_parameters())
    alike = all(not differences(machine, machine_of(None)) for machine in log.machines)
    share = experiment.remote.keep_offers
    again = MergesAgain(log, model, KeptOffers(folder, share), share, alike)
    again.run()
    close = f", {again.close} of them within a relative {TOLERANCE:g}" if again.close else ""
    return f"; {again.made} merges made again and compared{close}"


if __name__ == "__main__":
    program.run(main)
