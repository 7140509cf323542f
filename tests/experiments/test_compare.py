"""Comparisons: what is run, what is not run again, and what is told about it."""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from ddiloco.settings.experiment import parse, to_json
from experiments.cli import program
from experiments.studies import comparison, runs
from experiments.studies import results as tables
from tests.refusals import assert_refused

CONFIG = """
from configs import dense
from ddiloco.config import ConfigError


def get_config(preset="decoupled"):
    config = dense.get_config(f"tiny,{preset}")
    config.driver = "virtual"
    config.model.update(num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    config.inner.update(optimizer="adamw", learning_rate=0.003)  # takes half of Muon's time to compile
    config.data.update(sequence_length=32, train_split="train[:60]")
    config.train.update(steps=12, batch_size=2)
    config.sync.update(num_learners=2, num_fragments=3, interval=4)
    config.eval.update(every=3, num_batches=1, batch_size=4)
    config.sample.tokens = 0
    return config


def get_comparison(which="both"):
    if which == "dying":
        counted = {"preset": "decoupled", "virtual.arrays": False}
        dying = {"virtual.availability": "trace", "virtual.trace": TRACE}
        return [{"label": "dying", **counted, **dying}, {"label": "living", **counted}]
    if which != "both":
        raise ConfigError(f"no comparison {which!r}")
    return [
        {"label": "trained", "preset": "decoupled", "paper": {"goodput": 0.84}},
        {
            "label": "counted, one slower",
            "preset": "decoupled",
            "paper": {"time_ratio": 1.8},
            "virtual.arrays": False,
            "virtual.step_seconds": (1.0, 2.0),
            "train.steps": 10,
            "sync.quorum": None,
        },
    ]
"""
CSV = "time,learner,event\n2,0,fail\n2,1,fail\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    (folder / "trace.csv").write_text(CSV)
    (folder / "small.py").write_text(CONFIG.replace("TRACE", repr(str(folder / "trace.csv"))))
    return folder / "small.py"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "compared"


@pytest.fixture(scope="module")
def compared(programs, config, output):
    done = programs.run(
        "compare", "--config.train.steps", "8", f"--config={config}", f"--output={output}", "--jobs=2"
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_row_is_run_and_told_in_a_table_in_json_and_in_a_picture(compared, output):
    assert "[1/2] trained, seed 0\n" in compared.stderr
    assert "[2/2] counted, one slower, seed 0\n" in compared.stderr
    head, _, trained, counted = (output / "compare.md").read_text().splitlines()
    assert f"{head}\n" in compared.stdout and f"{counted}\n" in compared.stdout
    titles = [title.strip() for title in head.split("|")[3:-1]]
    assert titles[:4] == ["held-out loss", "tokens", "virtual seconds", "time ratio"]
    assert titles[4:] == ["goodput", "uptime", "merged", "mean quorum", "GB moved"]
    assert "100.0% (paper 84%)" in trained
    assert "| - " in counted and "2.000 (paper 1.8)" in counted
    first, second = json.loads((output / "compare.json").read_text())
    assert 4 < first["eval_loss"] < 7 and second["eval_loss"] is None
    assert second["wall_seconds"] == 2 * first["wall_seconds"] == 16
    assert "'--config.virtual.step_seconds=(1.0, 2.0)'" in second["command"]
    assert (output / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_overrides_reach_every_run_and_go_before_a_rows_own(compared, output):
    for folder, arrays in (("trained", True), ("counted,-one-slower", False)):
        settings = json.loads((output / folder / "seed=0" / "config.json").read_text())
        assert (settings["train"]["steps"], settings["virtual"]["arrays"]) == (8, arrays)
    assert settings["virtual"]["step_seconds"] == [1.0, 2.0]
    assert settings["sync"]["quorum"] is None


def test_a_second_call_starts_no_run_and_tells_the_same(compared, programs, config, output):
    summary = output / "trained" / "seed=0" / "summary.json"
    before = summary.stat().st_mtime_ns
    again = programs.run("compare", f"--config={config}", f"--output={output}", "--config.train.steps=8")
    assert (again.returncode, again.stderr, again.stdout) == (0, "", compared.stdout)
    assert summary.stat().st_mtime_ns == before


def test_a_run_that_fails_is_named_and_the_others_go_on(programs, config, tmp_path):
    done = programs.run("compare", f"--config={config}:dying", f"--output={tmp_path}", "--config.seed=3")
    assert_refused(done, "config.seed: is set for 'dying', but --seeds says which there are")
    done = programs.run("compare", f"--config={config}:dying", f"--output={tmp_path}", "--seeds=3")
    assert done.returncode == 1
    assert done.stderr.endswith("error: 1 of the runs failed: dying, seed 3 (it has not finished)\n")
    [living] = json.loads((tmp_path / "compare.json").read_text())
    assert (living["label"], living["seed"], living["goodput"]) == ("living", 3, 1.0)
    assert "held-out loss" not in done.stdout and "| dying  | 0 of 1 |" in done.stdout


WRONG = {
    "no comparison": (
        ["--config=configs/goodput.py"],
        "config: configs/goodput.py: has no get_comparison()",
    ),
    "unknown argument": (["--config=SMALL:nine"], "config: SMALL:nine: no comparison 'nine'"),
    "unknown field": (
        ["--config=SMALL", "--config.train.step=3"],
        "trained, seed 0: config.train.step: no such setting; did you mean steps?",
    ),
    "a seed twice": (["--config=SMALL", "--seeds=1,1"], "seeds: is '1,1', but must name at least one seed"),
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG)
def test_a_usage_error_is_told_in_one_line_before_anything_runs(arguments, told, programs, config, tmp_path):
    arguments = [argument.replace("SMALL", str(config)) for argument in arguments]
    done = programs.run("compare", *arguments, f"--output={tmp_path / 'out'}")
    assert_refused(done, told.replace("SMALL", str(config)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([{"preset": "tiny"}], "a row's label is None, but must be a name"),
        ([{"label": "../.."}], "a row's label is '../..', but must be a name"),
        ([{"label": "M=8"}, {"label": "M=8"}], "'M=8' and 'M=8' are too alike"),
        ([{"label": "a b"}, {"label": "a/b"}], "'a/b' and 'a b' are too alike"),
        ([{"label": "a", "paper": {"loss": 1}}], "'a': paper: no figure 'loss'; known: eval_loss, "),
        ([{"label": "a", "paper": {"goodput": "1"}}], "'a': paper: goodput is '1', but must be a number"),
        ([{"label": "a", "seed": 1}], "config.seed: is set for 'a', but --seeds says which there are"),
        ([{"label": "a", "against": "b"}], "'a': is held against 'b', which is no row"),
    ],
)
def test_rows_that_cannot_be_told_apart_or_understood_are_refused(entries, told, tmp_path):
    with pytest.raises(program.UsageError) as caught:
        comparison.study("configs/micro.py", entries, [0], [], tmp_path)
    assert told in str(caught.value)


def leave(plan, **figures):
    """What a finished run leaves."""
    workdir = plan.workdir
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps(plan.settings))
    summary = {
        "finished": True,
        "driver": "local",
        "tokens": {"0": 600, "1": 400},
        "goodput": None,
        **figures,
    }
    (workdir / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def study(tmp_path):
    """Two rows with three seeds, of which the second row's last has not finished."""
    entries = [{"label": "first"}, {"label": "a|b", "paper": {"time_ratio": 0.62}, "against": "first"}]
    study = comparison.study("configs/micro.py", entries, [0, 1, 2], [], tmp_path)
    scores = [{"tokens": n, "seconds": n / 10, "loss": 6 / (1 + n)} for n in (0, 500, 1000)]
    for run, seconds in zip(study.planned[:3], (10.0, 20.0, 30.0), strict=True):
        shares = {"goodput": 0.9, "lost": {"failed": 0.06, "detecting": 0.04}}
        leave(run, wall_seconds=seconds, eval_loss=2.0, eval_history=scores, **shares)
    for seed, (seconds, goodput) in enumerate([(6.0, 0.8), (16.0, 0.6)]):
        shares = {"goodput": goodput, "lost": {"failed": 1 - goodput, "detecting": 0.0}}
        leave(study.planned[3 + seed], wall_seconds=seconds, eval_loss=1.0 + 2 * seed, **shares)
    return study


def test_gaps_and_times_are_held_against_rows_seed_by_seed(study):
    frame = study.frame()
    assert frame.finished.tolist() == [True] * 5 + [False]
    assert frame.gap[3:5].tolist() == [-0.5, 0.5] and frame.gap[[0, 1, 2, 5]].isna().all()
    assert frame.time_ratio[:5].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.8])
    assert set(frame.tokens_total[:5]) == {1000}


def test_a_finished_run_of_other_settings_has_no_figures(study):
    run = study.planned[3]
    older = {**run.settings, "train": {**run.settings["train"], "batch_size": 99}}
    (run.workdir / "config.json").write_text(json.dumps(older))
    frame = study.frame()
    assert frame.finished.tolist() == [True] * 3 + [False, True, False]
    assert frame.eval_loss[3:].dropna().tolist() == [3.0]


def test_the_table_has_ours_beside_the_papers_and_no_empty_column(study):
    head, _, first, second = tables.table(study.frame(), ["label"]).splitlines()
    titles = ["", "", "runs", "held-out loss", "gap", "tokens", "wall seconds", "time ratio", "goodput", ""]
    assert [title.strip() for title in head.split("|")] == titles
    assert "| 20.0 ± 10.0" in first and "| 90.0% ± 0.0%" in first and "| 1,000 ± 0 " in first
    assert second.startswith("| a\\|b  | 2 of 3 | 2.0000 ± 1.4142 | +0.00% ± 70.71% |")
    assert "| 0.700 ± 0.141 (paper 0.62) |" in second and "| 70.0% ± 14.1% |" in second


def test_a_config_file_names_the_figures_of_its_table_in_their_order(study, tmp_path):
    assert tables.columns_of("configs/micro.py", "config") == tables.SHOWN
    (tmp_path / "two.py").write_text('COLUMNS = ("goodput", "wall_seconds", "age")')
    columns = tables.columns_of(f"{tmp_path}/two.py:any", "config")
    head = tables.table(study.frame(), ["label"], columns).splitlines()[0]
    assert [title.strip() for title in head.split("|")] == ["", "", "runs", "goodput", "wall seconds", ""]
    (tmp_path / "none.py").write_text('COLUMNS = ("goodput", "speed")')
    with pytest.raises(program.UsageError, match="COLUMNS: no figure 'speed'; known: eval_loss, "):
        tables.columns_of(f"{tmp_path}/none.py", "config")


def asked(**overrides) -> dict[str, Any]:
    """All settings of a small run, with `train__steps=7` for train.steps."""
    pairs = [(name.replace("__", "."), str(value)) for name, value in overrides.items()]
    return to_json(parse(program.resolve("configs/micro.py", pairs)))


def left(workdir: pathlib.Path, settings: Mapping[str, Any]) -> None:
    """What a finished run of these settings leaves."""
    (workdir / "config.json").write_text(json.dumps(settings))
    (workdir / "summary.json").write_text('{"finished": true}')


def test_a_run_with_other_settings_does_not_stand_for_this_one(tmp_path):
    settings = asked(train__steps=7)
    assert runs.lacking(tmp_path, settings) == "it has not finished"
    left(tmp_path, settings)
    assert runs.lacking(tmp_path, settings) is None
    assert runs.lacking(tmp_path, asked(train__steps=8)) == "train.steps was 7, but is 8 now"
    other_model = runs.lacking(tmp_path, to_json(parse(program.resolve("configs/micro.py:moe", ()))))
    assert other_model == "model.name was dense, but is moe now"
    (tmp_path / "config.json").write_text("{")
    assert runs.lacking(tmp_path, settings) == "its config.json cannot be read"


def test_a_setting_that_an_older_version_did_not_know_was_at_its_default(tmp_path):
    settings = asked()
    older = json.loads(json.dumps(settings))
    del older["outer"]["embeddings"]
    left(tmp_path, older)
    assert runs.lacking(tmp_path, settings) is None
    other = asked(outer__embeddings="rda")
    assert runs.lacking(tmp_path, other) == "outer.embeddings was direct, but is rda now"


def test_a_run_with_a_setting_that_is_gone_does_not_stand_for_this_one(tmp_path):
    settings = asked()
    left(tmp_path, {**settings, "train": {**settings["train"], "rows": 1}})
    assert runs.lacking(tmp_path, settings).startswith(
        "its config.json is of another version: config.train.rows"
    )


@pytest.mark.parametrize("budget", [("virtual__seconds", 5.0, 6.0), ("train__tokens", 50000, 60000)])
def test_steps_that_a_budget_set_are_not_compared(tmp_path, budget):
    name, before, after = budget
    left(tmp_path, asked(train__steps=99, **{name: before}))
    assert runs.lacking(tmp_path, asked(train__steps=70, **{name: before})) is None
    assert runs.lacking(tmp_path, asked(train__steps=70, **{name: after})) is not None


def test_the_folder_of_a_long_point_has_a_name_that_file_systems_allow(tmp_path):
    names = {runs.folder_name("é" * 100 + "sync.interval=24," * 20 + f"seed={seed}") for seed in range(3)}
    assert len(names) == 3
    for name in names:
        (tmp_path / name).mkdir()


OVERRIDES = {
    "--config.a.b=1": [("a.b", "1")],
    "--config.a 1 -config.b=x=y": [("a", "1"), ("b", "x=y")],
    "--config.a --jobs=2": [("a", "true")],
    "--config.a -1 --config.b": [("a", "-1"), ("b", "true")],
    "--noconfig.a --noconfigure --config.b=t": [("a", "false"), ("b", "t")],
    "--config=c.py:x --seeds 1": [],
}


@pytest.mark.parametrize(("line", "found"), OVERRIDES.items())
def test_overrides_are_taken_off_the_command_line(line, found, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare", *line.split()])
    assert program.take_overrides() == found
    assert not any("config." in argument and ".py" not in argument for argument in sys.argv)


def test_a_text_is_a_value_also_as_flags_spell_it():
    texts = ("true", "false", "none", "None", "3", "(1, 2)", "rda")
    assert [program.parse_literal(text) for text in texts] == [True, False, None, None, 3, (1, 2), "rda"]


def test_a_resolved_config_is_the_one_that_a_run_gets(config):
    overrides = [("sync.quorum", None), ("virtual.step_seconds", (1.0, 2.0)), ("train.steps", 5)]
    resolved = program.resolve(f"{config}:streaming", overrides)
    assert (resolved.algorithm, resolved.sync.quorum, resolved.train.steps) == ("streaming", None, 5)
    assert resolved.virtual.step_seconds == (1.0, 2.0)
    assert program.resolve(str(config), [("train.steps", 5), ("train.steps", 6)]).train.steps == 6
    with pytest.raises(program.UsageError, match="no preset 'huge'"):
        program.resolve(f"{config}:huge", [])
