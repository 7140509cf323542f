"""What is asked for wrongly ends with exit code 2 and one line that names it, never a traceback."""

import pytest

from ddiloco.storage.workdir import LOCK, owned
from tests.refusals import assert_refused

CASES = {
    "setting of before": (
        ["--config.outer.guard.strikes=5"],
        "config.outer.guard.strikes: is a setting no more: three of twelve offers put ",
    ),
    "wrong type": (["--config.train.steps=many"], "config.train.steps: is 'many', but must be of type int"),
    "a setting that went": (["--config.resume=true"], "config.resume: is a setting no more: it is --resume"),
    "no snapshot's number": (
        ["--resume=sometimes"],
        "resume=sometimes: must be true, false, auto or the number of a snapshot",
    ),
    "group as a value": (["--config.train=3"], "config.train=3: is a group of settings, which"),
    "unknown preset": (
        ["--config=configs/dense.py:huge"],
        "config: configs/dense.py:huge: no preset 'huge'",
    ),
    "no Python file": (["--config=README.md"], "config: README.md: is no Python file, which ends in .py\n"),
    "no argument": (["--config=experiments/cli/saved.py"], "config: experiments/cli/saved.py: its get_"),
    "missing file": (["--config=configs/nothing.py"], "config: configs/nothing.py: no such file"),
    "field of another preset": (
        ["--config", "configs/dense.py:2b", "--config.model.layers=1"],
        "config.model.layers: no such setting; did you mean num_layers?",
    ),
    "factory that is not there": (
        ["--config=configs/loop.py", "--config.model.factory=nowhere:make_loop"],
        "config.model.factory: nowhere:make_loop cannot be imported: ModuleNotFoundError: No module named",
    ),
    "what the factory does not take": (
        ["--config=configs/loop.py", "--config.model.settings.wide=3"],
        "config.model.settings: do not fit make_loop: got an unexpected keyword argument 'wide'",
    ),
    "misspelled file": (
        ["--config=configs/dens.py:tiny"],
        "config: configs/dens.py: no such file; did you mean configs/dense.py?\n",
    ),
    "misspelled name of a config": (
        ["--config=dens:tiny"],
        "config: dens: no such file; did you mean dense?\n",
    ),
    "a setting without its group": (
        ["--quorum=2"],
        "quorum: no such flag; did you mean --config.sync.quorum?\n",
    ),
    "unknown flag": (["--worker=1"], "Unknown command line flag 'worker'"),
    "a setting without its first word": (
        ["--sync.quorum=2"],
        "sync.quorum: no such flag; did you mean --config.sync.quorum?\n",
    ),
    "no flag file": (["--flagfile=/nowhere"], "Unable to open flagfile: [Errno 2] No such file or direc"),
    "stray argument": (["configs/dense.py"], "unexpected argument 'configs/dense.py'; flags begin with --"),
    "snapshots in virtual time": (
        ["--config.driver=virtual", "--config.snapshot.every=4"],
        "config.snapshot.every: is 4, but must be 0 where driver is virtual: a virtual run starts again from",
    ),
}


@pytest.mark.parametrize(("arguments", "told"), CASES.values(), ids=CASES)
def test_a_usage_error_is_told_in_one_line(arguments, told, programs, tmp_path):
    assert_refused(programs.run("train", *arguments, f"--workdir={tmp_path / 'run'}"), told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("program", "flag"),
    [("train", "workdir"), ("tune", "output")],
)
def test_no_run_is_in_a_bucket(program, flag, programs):
    done = programs.run(program, f"--{flag}=gs://bucket/run")
    assert_refused(done, f"{flag}: gs://bucket/run: must be on a disk with file locks")


def test_a_folder_that_another_run_has_is_told_before_any_process_is_started(programs, tmp_path):
    with owned(tmp_path):
        done = programs.run("train", "--config.driver=remote", f"--workdir={tmp_path}")
    assert_refused(done, f"workdir: {tmp_path}: belongs to a run in progress, of process ")
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_data_set_out_of_reach_is_told_before_anything_is_compiled(programs, tmp_path):
    told = "no_such_text"
    done = programs.run("train", f"--config.data.name={told}", f"--workdir={tmp_path / 'run'}")
    assert_refused(done, f"config.data.name: TFDS knows no data set '{told}' and none is prepared under ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("evaluate", ["--checkpoint=/nowhere"], "checkpoint: /nowhere: no such folder of checkpoints"),
        ("bench", [], "name one benchmark of learner, merge"),
        ("bench", ["lerner"], "lerner: no such benchmark; did you mean learner?\n"),
        ("bench", ["merge", "--output=/proc/nothing/x.json"], "output: /proc/nothing/x.json: "),
        ("averages", ["--output=/nowhere", "--config.eval.every=None"], "config.eval.every: is None, but "),
        ("traces", ["--trace=/nowhere.csv"], "trace: /nowhere.csv: No such file or directory"),
        (
            "traces",
            ["--trace=/nowhere.csv", "--systems=all"],
            "systems: is 'all', but must be ",
        ),
        (
            "traces",
            ["--trace=/nowhere.csv", "--restart_seconds=nan"],
            "restart_seconds: is nan, but must be a finite number\n",
        ),
        ("launch", [], "launcher: is missing; give --launcher=ray|gke|slurm|cloud_tpu|skypilot\n"),
        ("train", ["--profile=5"], "profile: is '5', but must be FIRST:LAST, steps from 2 on, such as 20:24"),
        ("learner", ["--learner_id=0", "--profile=2:3"], "profile: needs --workdir, where the trace goes"),
        ("guards", ["--config.eval.every=None"], "config.eval.every: is None, but what lies do is a score"),
        (
            "evaluator",
            ["--config=configs/dense.py:tiny,data_parallel", "--workdir=/nowhere"],
            "config.driver: is remote, but data_parallel is one job, which needs local",
        ),
        ("make_tokens", ["--learners=2"], "output: is missing; give --output"),
        ("replay", ["--workdir=/nowhere"], "workdir: /nowhere: there is no run in it"),
        ("verify", ["--log=/nowhere"], "log: /nowhere: there is no run in it"),
        ("tokenize", ["--config=configs/vit.py", "--output=/nowhere/x"], "config: trains on no text"),
        ("tokenize", ["--output=/proc/tokens"], "output: /proc/tokens: "),
    ],
)
def test_the_other_programs_tell_usage_errors_too(name, arguments, told, programs):
    assert_refused(programs.run(name, *arguments), told)


@pytest.mark.parametrize("name", ["plan", "replay"])
def test_a_run_whose_settings_cannot_be_used_is_told_in_one_line(name, programs, tmp_path):
    (tmp_path / "config.json").write_text('{"remote": {"donor_host": "10.0.0.1"}}')
    done = programs.run(name, f"--workdir={tmp_path}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(
        f"error: {tmp_path / 'config.json'}: cannot be used: config.remote.donor_host: "
    )
