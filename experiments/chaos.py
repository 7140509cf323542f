"""Real processes and a seeded killer: `python -m experiments.chaos --config=FILE --workdir=DIR`.

The config file has `get_config(preset)`, of the run, and `get_chaos(preset)`, of what befalls it; settings of
the latter are given as --chaos.field=value. Every learner reaches the syncer through a proxy of its own, in
which partitions are made. Leaves in DIR: faults.jsonl, chaos.json, chaos.md, chaos.png, the run in job/, and
with --undisturbed a run of as many tokens without faults in undisturbed/. Exit code 1 if an outer step was
lost, or a token counted twice, or there was a time at which no learner stepped.
"""

from __future__ import annotations

import ast
import json
import pathlib
import sys
import threading

from absl import flags

from experiments.front import cli, ending

_CONFIG = cli.define_config("configs/chaos_processes.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run. Default: runs/<time>.")
_UNDISTURBED = flags.DEFINE_bool("undisturbed", False, "Then train on as many tokens without faults.")
LOOK = 0.2  # seconds


def take_chaos() -> dict[str, str]:
    """Takes every `--chaos.field=value` off the command line."""
    taken = [a for a in sys.argv[1:] if a.startswith("--chaos.") and "=" in a]
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in taken]
    return dict(a.removeprefix("--chaos.").split("=", 1) for a in taken)


_GIVEN = take_chaos()


def load_chaos(argument: str, given: dict[str, str]) -> dict:
    """What `get_chaos` of FILE.py[:PRESET] says, with what was given in its place.

    Raises:
      UsageError: the file has no such function.
    """
    path, _, preset = argument.partition(":")
    module = cli.load_module(path, "config")
    if not hasattr(module, "get_chaos"):
        raise cli.UsageError(f"config: {path} has no get_chaos(preset)")
    values = dict(module.get_chaos(preset) if preset else module.get_chaos())
    for name, text in given.items():
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def main(_) -> int:
    from ddiloco.config import build
    from ddiloco.run.job import set_aside
    from ddiloco.settings.experiment import parse
    from experiments.studies.chaos import aftermath, lanes_figure
    from experiments.studies.chaos.processes import ProcessChaos, draw_plan

    experiment = parse(_CONFIG.value)
    if experiment.driver != "remote":
        raise cli.UsageError(f"config.driver: is {experiment.driver}, but must be remote")
    chaos = load_chaos(cli.config_arguments()[0].removeprefix("--config="), _GIVEN)
    plan = draw_plan(build(ProcessChaos, chaos, "chaos"), experiment.sync.num_learners)
    workdir = pathlib.Path(_WORKDIR.value or ending.new_workdir())
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        set_aside(workdir)
    except OSError as error:
        raise cli.UsageError(f"workdir: {workdir}: {error.strerror}") from None
    stop, received = ending.stop_on_signals()
    told, trace, code = run(experiment, workdir / "job", workdir / "faults.jsonl", plan, stop)
    if code == cli.USAGE_ERROR:
        return code
    if not code and _UNDISTURBED.value:
        alone, _, code = run(
            experiment,
            workdir / "undisturbed",
            workdir / "undisturbed.jsonl",
            (),
            stop,
            [f"--config.train.steps={steps_of_tokens(experiment, told)}"],
        )
        told = aftermath.compared(told, alone)
    (workdir / "chaos.json").write_text(json.dumps(told, indent=2) + "\n")
    (workdir / "chaos.md").write_text(aftermath.table(told) + "\n")
    lanes_figure.draw(workdir / "chaos.png", trace)
    print(aftermath.table(told))
    print(f"{workdir}/chaos.json  {workdir}/chaos.png")
    if received or code:
        return 128 + received[0] if received else code
    for line in aftermath.problems(told):
        print(f"error: {line}", file=sys.stderr)
    return 1 if aftermath.problems(told) else 0


def steps_of_tokens(experiment, told) -> int:
    """T of a run without faults that trains on as many tokens, by how fast the clock went in this one."""
    rows = sum(experiment.batch_size(m) for m in range(experiment.sync.num_learners))
    return max(1, round(told["tokens"] * told["clock_rate"] / (rows * experiment.data.sequence_length)))


def run(experiment, workdir, faults, plan, stop, overrides=()):
    """One run under a plan of faults; its report, what it left, and its exit code."""
    from ddiloco.launch.processes import run_all
    from experiments.studies.chaos import aftermath, killer
    from experiments.studies.chaos.traces import read_trace

    over, struck = threading.Event(), threading.Event()
    watch = Watch(experiment, workdir, killer.Journal(faults), over)

    def strike() -> None:
        try:
            while not over.wait(LOOK) and not watch.all_step():
                pass
            watch.journal.write("storm")
            killer.Killer(watch.pid, watch.cut, watch.journal).run(plan, over)
        finally:
            struck.set()

    threading.Thread(target=strike, name="killer", daemon=True).start()
    arguments = [*cli.config_arguments(), *overrides]
    try:
        told = {"observe": watch.observe, "route": watch.route}
        code = run_all(experiment, arguments, workdir, stop, cli.tell, **told)
    finally:
        over.set()
        struck.wait()
        watch.close()
    trace = read_trace(workdir, faults, experiment.sync.num_learners)
    summary = workdir / "summary.json"
    loss = json.loads(summary.read_text()).get("eval_loss") if summary.exists() else None
    sync = experiment.sync
    return aftermath.report(trace, loss, sync.interval, sync.num_fragments), trace, code


class Watch:
    """The processes of a run as the killer sees them, and their links; writes down their starts and ends."""

    def __init__(self, experiment, workdir: pathlib.Path, journal, over: threading.Event) -> None:
        """`over` is set once a learner has done its last step: what remains is the end, not a run."""
        self.journal, self._over = journal, over
        self._experiment, self._workdir = experiment, workdir
        self._pids: dict[str, int] = {}
        self._proxies = {}
        self._layout = None

    def observe(self, name: str, pid: int, code: int | None) -> None:
        """What the supervisor tells; a syncer's durable versions are written down before its next start."""
        from experiments.studies.chaos.processes import SYNCER

        target = SYNCER if name.endswith(SYNCER) else name
        if code is None:
            self.journal.write("start", target, pid=pid)
            self._pids[target] = pid
            return
        self._pids.pop(target, None)
        if code == 0:
            self._over.set()
        more = {"code": code}
        if target == SYNCER:
            more |= self._durable()
        self.journal.write("end", target, pid=pid, **more)

    def route(self, learner: int, address: str) -> str:
        """The address of the learner's proxy, which passes on to the syncer's."""
        from experiments.studies.chaos.processes import learner_name
        from experiments.studies.chaos.proxy import Proxy

        host, port = address.rsplit(":", 1)
        proxy = self._proxies[learner_name(learner)] = Proxy((host, int(port)), seed=learner).start()
        return "{}:{}".format(*proxy.address)

    def pid(self, target: str) -> int | None:
        """The target's process, if it runs."""
        return self._pids.get(target)

    def cut(self, target: str, apart: bool) -> None:
        """Cuts a learner off, or heals that."""
        proxy = self._proxies[target]
        (proxy.partition if apart else proxy.heal)()

    def all_step(self) -> bool:
        """Whether every learner has stepped."""
        paths = [
            self._workdir / "learners" / str(m) / "steps.jsonl"
            for m in range(self._experiment.sync.num_learners)
        ]
        return all(path.is_file() and path.stat().st_size for path in paths)

    def close(self) -> None:
        """Ends the proxies and the journal."""
        for proxy in self._proxies.values():
            proxy.close()
        self.journal.close()

    def _durable(self) -> dict:
        from ddiloco.disk.durable import DurableState, DurableStateError
        from ddiloco.run.recipes import assembly_of

        self._layout = self._layout or assembly_of(self._experiment).layout
        durable = DurableState(self._workdir / "syncer", self._layout, lambda record: None, threading.Event())
        try:
            return {"versions": list(durable.load().state.versions)}
        except DurableStateError as error:
            return {"problem": str(error)}


if __name__ == "__main__":
    cli.run(main)
