"""Images through the programs: trained, scored by accuracy, and scored again from the checkpoint."""

import json

import pytest

SMALLEST = (
    "--config.model.num_layers=1",
    "--config.train.batch_size=4",
    "--config.train.steps=8",
    "--config.inner.warmup_steps=2",
    "--config.sync.num_learners=2",
    "--config.sync.num_fragments=2",
    "--config.sync.interval=4",
    "--config.eval.every=4",
    "--config.eval.num_batches=1",
    "--config.eval.batch_size=8",
)


@pytest.mark.parametrize(
    ("config", "driver", "options"),
    [
        ("vit", "local", ("--config.model.model_dim=16", "--config.model.mlp_dim=16")),
        pytest.param(
            "multimodal",
            "virtual",
            ("--config.model.mlp_dim=16", "--config.sample.images=2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_images_are_trained_on_and_their_checkpoint_scored_again(programs, tmp_path, config, driver, options):
    asked = (f"--config=configs/{config}.py", f"--config.driver={driver}", f"--workdir={tmp_path}")
    done = programs.run("train", *asked, *SMALLEST, *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"]
    assert 0 <= summary["eval_accuracy"] <= 1
    assert all("accuracy" in entry for entry in summary["eval_history"])
    if config == "vit":
        assert sum(summary["tokens"].values()) == 4 * sum(summary["inner_steps"].values())
    else:
        assert len((tmp_path / "sample.txt").read_text().splitlines()) >= 2
        assert "sample: " in done.stdout
    output = tmp_path / "score.json"
    again = programs.run("evaluate", f"--checkpoint={tmp_path}/checkpoints", f"--output={output}")
    assert again.returncode == 0, again.stderr
    score = json.loads(output.read_text())
    assert score["eval_accuracy"] == summary["eval_accuracy"]
    assert score["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)
