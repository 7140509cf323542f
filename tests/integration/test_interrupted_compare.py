"""A comparison whose runs are cut by SIGTERM goes on where they were: no step is taken twice."""

import json
import signal

from tests.integration.remote_runs import lines, summary_of

CONFIG = """
from configs import dense


def get_config(preset="decoupled"):
    config = dense.get_config(f"tiny,{preset},paper")
    config.model.update(num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    config.inner.update(optimizer="adamw", learning_rate=0.003)  # takes half of Muon's time to compile
    config.data.update(sequence_length=32, train_split="train[:60]")
    config.train.update(steps=100, batch_size=2, min_step_seconds=(0.05, 0.05))
    config.sync.update(num_learners=2, num_fragments=3, interval=6)
    config.eval.update(every=0, num_batches=1, batch_size=4)
    config.sample.tokens = 0
    return config


def get_comparison():
    return [{"label": name, "preset": name} for name in ("data_parallel", "decoupled")]
"""


def test_each_call_goes_on_where_the_one_before_was_cut(programs, tmp_path):
    config, output = tmp_path / "pieces.py", tmp_path / "compared"
    config.write_text(CONFIG)
    given = [f"--config={config}", f"--output={output}", f"--config.data.data_dir={programs.data_dir}"]
    runs = [output / name / "seed=0" for name in ("data_parallel", "decoupled")]
    for number, run in enumerate(runs):
        process = programs.start("compare", *given)
        done = programs.interrupt(process, run / "learners" / "0" / "steps.jsonl", signal.SIGTERM)
        assert done.returncode == 128 + signal.SIGTERM, done.stderr
        begun = [f"[{i}/2] {name}, seed 0" for i, name in ((1, "data_parallel"), (2, "decoupled"))]
        assert done.stderr.splitlines() == [
            *begun[max(0, number - 1) : number + 1],
            "saving what is under way",
            f"interrupted with {2 - number} of 2 runs to do; the same command goes on",
        ]
        summary = summary_of(run)
        assert (summary["interrupted"], summary["finished"]) == (True, False)
        assert 0 < summary["step"] < 100
        assert [score["step"] for score in summary["eval_history"]] == [0], "no time for a score"
    last = programs.run("compare", *given)
    assert (last.returncode, last.stderr) == (0, "[2/2] decoupled, seed 0\n")
    assert [row["label"] for row in json.loads((output / "compare.json").read_text())] == [
        "data_parallel",
        "decoupled",
    ]
    for run in runs:
        summary = summary_of(run)
        assert [score["step"] for score in summary["eval_history"]] == [0, 100]
        assert not (run / "previous").exists(), "nothing begins anew"
        for learner in summary["inner_steps"]:
            steps = [line["step"] for line in lines(run / "learners" / learner / "steps.jsonl")]
            assert steps == sorted(set(steps)) and steps[-1] == 100, "each step is taken once"
    [job] = [lines(runs[0] / "learners" / "0" / "steps.jsonl")]
    assert [line["step"] for line in job] == list(range(1, 101))
