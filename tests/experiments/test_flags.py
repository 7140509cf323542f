"""Flags of all programs: one name for one thing, and what a command has no use for is refused."""

import ast

import pytest

from tests.integration.programs import ROOT
from tests.refusals import assert_refused

# Folder of the run, and where a program leaves files of its own.
WORKDIR = {"train", "syncer", "learner", "evaluator", "chaos", "launch", "dashboard", "report", "replay"}
WORKDIR |= {"control", "export", "plan", "rollback", "tape"}
OUTPUT = {"averages", "bench", "compare", "compile", "evaluate", "guards", "launch", "make_tokens", "report"}
OUTPUT |= {"adapting", "agreement", "links", "plan", "scaling", "simulate", "sweep", "tokenize", "tune"}
PROGRAMS = [*sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py")), "bench"]
DEFINES = ("DEFINE_", "define")


def strings_of(program):
    """The flags that a program defines itself: the constant strings that a flag's definition begins with."""
    path = ROOT / "experiments" / (f"{program}.py" if program != "bench" else "bench/__main__.py")
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr.startswith(DEFINES):
            yield from [one.value for one in call.args if isinstance(one, ast.Constant)][:1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_s_folder_and_a_program_s_own_files_have_one_name_each(program):
    defined = set(strings_of(program))
    assert ("workdir" in defined, "output" in defined) == (program in WORKDIR, program in OUTPUT)
    assert not defined & {"out", "dir", "folder", "run", "output_dir", "out_dir", "work_dir", "logdir"}


@pytest.mark.parametrize(
    ("program", "flag", "instead"),
    [
        ("compare", "workdir", "output"),
        ("syncer", "output", "workdir"),
        ("evaluate", "workdir", "checkpoint"),
        ("export", "output", "to"),
    ],
)
def test_the_other_name_says_which_is_meant(program, flag, instead, programs):
    assert_refused(programs.run(program, f"--{flag}=x"), f"{flag}: no such flag; give --{instead}\n")


@pytest.mark.parametrize("program", ["syncer", "learner", "evaluator", "train"])
def test_help_lists_the_flags_that_programs_share(program, programs):
    told = programs.run(program, "--help").stdout
    shared = {"train": ["config", "workdir"]}.get(program, ["config", "workdir", "health", "grace"])
    assert all(f"  --{flag}:" in told for flag in shared)
    assert program == "train" or "$DDILOCO_WORKDIR" in told


WITHOUT_USE = {
    "launch": [
        (["--launcher=ray", "--dry_run"], "dry_run: has no use with --launcher=ray; it is for gke, slurm"),
        (["--launcher=slurm", "--spot"], "spot: has no use with --launcher=slurm; it is for gke, cloud_tpu"),
        (["--launcher=ray", "--version=v5p", "--cpus=2"], "cpus: has no use with --version; --topology says"),
        (
            ["--launcher=ray", "--config.remote.hosts=2,2"],
            "config.remote.hosts: has no use with --launcher=ray",
        ),
    ],
    "train": [
        (["--settings", "--dry_run"], "dry_run: has no use with --settings"),
        (["--dry_run", "--profile=2:3"], "profile: has no use with --dry_run"),
    ],
    "syncer": [
        (["--shard=1", "--finish"], "finish: has no use with --shard; it is for the first"),
        (["--shard=1"], "workdir: is missing, but must be that of the first shard"),
    ],
    "learner": [
        (["--learner_id=0", "--coordinator=x:1"], "coordinator: has no use without --processes"),
    ],
    "averages": [
        (["--output=DIR", "--seeds=0,1", "--config.seed=1"], "config.seed: has no use with --seeds"),
        (["--output=DIR", "--config.driver=local"], "config.driver: is local, but is virtual in this"),
    ],
    "guards": [
        (["--config.sync.num_learners=4"], "config.sync.num_learners: is 4, but is 8 in this program's runs"),
    ],
    "compile": [
        (["--table=DIR/t.md", "--topology=v5e:2x4"], "topology: has no use with --table"),
    ],
    "links": [
        (["--listen=127.0.0.1:0", "--limit=1Mbit"], "limit: has no use with --listen\n"),
        (["--syncer=x:1", "--limit=1Mbit", "--output=DIR/x"], "output: has no use with --limit, which"),
        (["--syncer=x:1", "--limit=fast"], "limit: is 'fast', but must be a rate such as 200Mbit, or none\n"),
        ([], "syncer: is missing; give --syncer=HOST:PORT, or --listen=HOST:PORT\n"),
    ],
    "tape": [(["--workdir=DIR", "--steps=2"], "steps: has no use without --around")],
    "traces": [
        (["--trace=DIR/x", "--replacement_seconds=5"], "replacement_seconds: has no use without --spares")
    ],
    "bench": [
        (["merge", "--size=1b"], "size: has no use for benchmark merge; it is for accelerator"),
        (["schedules", "--seed=1", "--schedules=2"], "schedules: has no use with --seed"),
    ],
    "sweep": [
        (
            ["--sweep=virtual.loss=0,0.1", "--output=DIR"],
            "sweep: virtual.loss: has no use where driver is local",
        ),
        (
            ["--sweep=configs/sweeps/quality.py", "--config=configs/moe.py", "--output=DIR"],
            "config: each point of the sweep names its own; leave --config out",
        ),
    ],
}


@pytest.mark.parametrize(
    ("program", "given", "told"),
    [(program, *case) for program, cases in WITHOUT_USE.items() for case in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_a_command_has_no_use_for_is_refused_before_anything_is_made(
    program, given, told, programs, tmp_path
):
    folder = tmp_path / "made"
    done = programs.run(program, *(word.replace("DIR", str(folder)) for word in given))
    assert_refused(done, told)
    assert not folder.exists()


def test_a_sweep_s_run_is_given_what_it_has_a_use_for(tmp_path):
    from experiments.studies import runs, sweeps

    given = [("virtual.arrays", "false")]
    sweep = sweeps.load("driver=local,virtual;outer.optimizer=direct,nesterov;outer.momentum=0.1,0.2")
    planned = [
        runs.plan(sweeps.point_name(point), "configs/dense.py", [*point.items(), *given], tmp_path)
        for point in sweep.points
    ]
    for point, run in zip(sweep.points, planned, strict=True):
        told = " ".join(run.arguments())
        assert ("outer.momentum" in told) == (point["outer.optimizer"] == "nesterov")
        assert ("virtual.arrays" in told) == (point["driver"] == "virtual")
    runs.refuse_idle(["virtual.arrays", "outer.momentum"], planned)  # some runs have a use for each
