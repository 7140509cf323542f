"""Continues the pre-training of a model of transformers on files of JSON lines.

  python -m experiments.train --config=experiments/examples/continued_pretraining.py:WEIGHTS \\
    --config.data.name='/data/*.jsonl' --workdir=runs/continued
  python -m experiments.export --workdir=runs/continued --to=runs/continued_weights

WEIGHTS is a folder of a Qwen3 or Qwen3-MoE: model.safetensors (or several, with an index), config.json,
tokenizer.json and tokenizer_config.json. Each line of the files is an object whose "text" is a document.
`AutoModelForCausalLM.from_pretrained("runs/continued_weights")` loads the result (docs/weights.md).
"""

import pathlib

from ml_collections import ConfigDict

from configs import sections
from ddiloco.weights.qwen3 import model_settings


def get_config(weights: str) -> ConfigDict:
    """The settings for the weights in this folder."""
    folder = pathlib.Path(weights).expanduser()
    model = model_settings(folder)
    config = sections.run(model["name"])
    config.init_from = str(folder)
    config.model.update(model)
    config.model.scale_embeddings = False  # so Adam's steps suit embeddings as published
    config.model.scan_layers = True  # compiles one layer, not dozens
    config.model.compute_dtype = "bfloat16"

    config.data.name = "/data/*.jsonl"
    config.data.text_feature = "text"
    config.data.tokenizer = "huggingface"
    config.data.tokenizer_model = str(folder / "tokenizer.json")
    config.data.sequence_length = 1024

    config.sync.num_learners = 4
    config.sync.rebase = True  # loses no work
    config.train.steps = 4800
    config.train.batch_size = 16  # rows of a learner's step
    # The rate of published weights has gone down already: a high one would undo some of their training.
    config.inner.learning_rate = 3e-5
    config.inner.warmup_steps = 200
    config.eval.every = 240
    config.export.every = 480  # models for transformers, while the run goes on
    return config
