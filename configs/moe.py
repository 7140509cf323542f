"""Mixture-of-experts language models: configs/dense.py with a choice of experts by token in place of the MLP.

  python -m experiments.train --config=configs/moe.py[:SIZE][,ALGORITHM][,EXCHANGE] [--config.FIELD=VALUE]
  python -m experiments.compare --config=configs/moe.py[:SIZE]

SIZE         parameters, activated by a token (--dry_run prints both)
  tiny       2.4M, 0.8M; on the Python standard library's sources, minutes on 2 CPU cores (default)
  small      130M, 24M; one accelerator
  2.8b       12.7B, 2.8B; shapes in the class of the paper's models
  3.8b       17.9B, 3.8B
ALGORITHM    as in configs/dense.py
"""

from ml_collections import ConfigDict

from configs import baselines, dense, sections

SIZES = ("tiny", "small", "2.8b", "3.8b")


def get_config(preset: str = "tiny") -> ConfigDict:
    """The settings of `SIZE,ALGORITHM,EXCHANGE`; any of them may be left out."""
    size, algorithm, exchange = sections.words(preset, SIZES, dense.ALGORITHMS, dense.EXCHANGES)
    config = dense.begin(f"{_dense(size)},{algorithm},{exchange}")
    config.model = model(size)
    if size == "tiny":  # found by a sweep: docs/results/quality.md
        config.inner.optimizer, config.inner.learning_rate = "muon", 0.012
    if size in ("2.8b", "3.8b"):  # experts and rows over all devices of a learner
        config.mesh.fsdp, config.mesh.expert = -1, -1
        config.inner.mu_dtype = "bfloat16"  # 10 bytes a parameter, not 12
    return config


def model(size: str) -> ConfigDict:
    """The decoder's shape: attention of the dense decoder, and experts."""
    c = dense.model(_dense(size), "moe")
    if size == "3.8b":
        c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.mlp_dim = 33, 2560, 10, 2, 10240
    #                                                experts chosen width shared
    c.num_experts, c.experts_per_token, c.expert_dim, c.shared_expert_dim = {
        "tiny": (8, 2, 176, 0),
        "small": (16, 2, 704, 0),
        "2.8b": (64, 8, 1024, 2048),
        "3.8b": (64, 8, 1024, 2048),
    }[size]
    if size in ("2.8b", "3.8b"):
        c.remat = "dots_saveable"  # matmuls are not done again; "full" does, for chips of less memory
    c.dense_layers = 0 if size == "tiny" else 1  # first layers, with an MLP of mlp_dim instead of experts
    if size != "tiny":
        c.capacity_factor = 1.25  # places of an expert for a row's tokens over its fair share, not 1.5
    return c


def _dense(size: str) -> str:
    return "2b" if size in ("2.8b", "3.8b") else size


get_comparison, get_tuning = baselines.tables(get_config, SIZES)
