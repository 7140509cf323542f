"""The MaxText loop: the share of the data of each learner, and a model that MaxText itself goes on with."""

import itertools
import math
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import ddiloco

pytest.importorskip("maxtext", reason="needs the environment of docs/your_own.md#maxtext")

from ddiloco.data.sources import data_root, open_text
from experiments.examples import maxtext_loop
from tests.integration.programs import ROOT

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "your_own.md"


@pytest.fixture(scope="module")
def settings():
    open_text("stdlib_text", "train")
    return {
        "grain_train_files": f"{data_root(None)}/stdlib_text/*/*/*-train.array_record-*",
        "tokenizer_path": str(maxtext_loop.MAXTEXT / "assets" / "tokenizers" / "tokenizer.default"),
        "base_emb_dim": 16,
        "base_mlp_dim": 32,
        "base_num_decoder_layers": 1,
        "head_dim": 16,
        "max_target_length": 64,
        "per_device_batch_size": 2,
    }


def place(learner):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "fsdp"))
    return ddiloco.Place(learner, 2, 0, mesh)


def test_learners_read_other_rows_and_continue_where_they_were(settings):
    loops = [maxtext_loop.make_loop(place(learner), **settings) for learner in (0, 1)]
    first, other = (list(itertools.islice(loop.batches(), 2)) for loop in loops)
    assert first[0]["inputs"].shape == (2 * 2, 64)  # of two devices of the eight
    assert not np.array_equal(first[0]["inputs"], other[0]["inputs"])
    batches, continued = (loops[0].batches() for _ in range(2))
    next(batches)
    continued.set_state(batches.get_state())
    assert np.array_equal(next(continued)["inputs"], first[1]["inputs"])
    assert 0 < loops[0].tokens(first[0]) <= loops[0].step_tokens == 2 * 2 * 64


def test_commands_of_the_page_train_a_model_that_maxtext_reads(tmp_path):
    section = PAGE.read_text().split("### MaxText\n")[1].split("\n### ")[0]
    commands = re.findall(r"^    (python -m (?:.*\\\n)*.*)$", section, re.M)
    assert len(commands) == 2
    printed = []
    for command in commands:
        environment = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TFDS_DATA_DIR": data_root(None)}
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout + done.stderr)
    losses = [float(x) for x in re.findall(r"completed step: \d+, .* lm_loss: ([\d.]+)", printed[1])]
    assert len(losses) == 3 and max(losses) < 8 < math.log(
        32_000
    )  # which is about what it is before training
