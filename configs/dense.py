"""Dense decoder-only language models, trained with Decoupled DiLoCo.

  python -m experiments.train --config=configs/dense.py[:SIZE][,ALGORITHM][,EXCHANGE] [--config.FIELD=VALUE]
  python -m experiments.compare --config=configs/dense.py[:SIZE]

SIZE
  tiny      0.8M parameters on the Python standard library's sources; under 4 minutes on 2 CPU cores (default)
  small     24M parameters; one accelerator, or a patient CPU
  160m 400m 1b  for one accelerator of 80 GB or more, which learners may share: docs/results/accelerator.md
  2b 5b 9b  shapes in the class of the paper's models; look at them on any machine with --dry_run
ALGORITHM
  decoupled (default), streaming, diloco   presets of one machinery; an update of streaming overwrites the
                                           steps since its offer, a sixth of the work with `frequent`
  data_parallel, lone_learner              baselines: all learners' batches in one, or learner 0 alone
EXCHANGE
  frequent  every 6 steps in four bits, both ways: less loss for half of the bytes (default)
  paper     every 24 steps in float32
"""

from ml_collections import ConfigDict, config_dict

from configs import baselines, sections

OF_ONE_ACCELERATOR = ("160m", "400m", "1b")
OF_MANY = ("2b", "5b", "9b")
SIZES = ("tiny", "small", *OF_ONE_ACCELERATOR, *OF_MANY)
ALGORITHMS = ("decoupled", "streaming", "diloco", "data_parallel", "lone_learner")
EXCHANGES = ("frequent", "paper")


def get_config(preset: str = "tiny") -> ConfigDict:
    """The settings of `SIZE,ALGORITHM,EXCHANGE`; any of them may be left out."""
    config, (size, *_) = begin(preset), sections.words(preset, SIZES, ALGORITHMS, EXCHANGES)
    if size == "tiny":  # found by a sweep: docs/results/quality.md
        config.inner.optimizer, config.inner.learning_rate = "muon", 0.012
    return config


def begin(preset: str) -> ConfigDict:
    """The same without a tuned inner optimizer: what other configs begin with."""
    size, algorithm, exchange = sections.words(preset, SIZES, ALGORITHMS, EXCHANGES)
    config = sections.run("dense")
    config.model = model(size)
    if size != "tiny":  # which has the defaults of all these
        small = size == "small"
        config.data.sequence_length = 512 if small else 2048
        config.train.steps = 4800 if small else 48_000
        config.train.batch_size = 16 if small else 128
        config.inner.learning_rate = 1e-3 if small else 3e-4  # wide models take smaller steps
        config.inner.warmup_steps = 200 if small else 1000
        config.eval.every = 240 if small else 2400
        config.eval.num_batches = 32
    if size in OF_ONE_ACCELERATOR:
        config.train.batch_size = 16  # 32,768 tokens; what four learners that share 141 GB have room for
        config.inner.learning_rate = {"160m": 6e-4, "400m": 4e-4, "1b": 3e-4}[size]
        config.data.threads, config.data.prefetch = 4, 2  # its steps are too short to wait for text
    if size in OF_MANY:
        config.mesh.data, config.mesh.fsdp = 1, -1  # no device holds all parameters
        config.eval.batch_size = 128  # a row for each of as many devices
        config.sync.num_learners = 8  # the paper's
    elif size in ("tiny", "small"):
        config.sync.num_fragments = 12  # small models have few tensors

    if exchange == "frequent":  # found by configs/exchange.py: docs/results/quality.md
        config.sync.interval = 6
        config.outer.codec = config.outer.update_codec = "int4"

    config.algorithm = algorithm
    config.sync.rebase = algorithm == "decoupled"  # loses no work
    if algorithm in ("streaming", "diloco"):  # all learners are waited for, and they for the rounds
        config.sync.quorum = config_dict.placeholder(int)
        config.sync.max_run_ahead = config.sync.overlap
    if algorithm == "streaming":  # an update is applied when it comes, after tau steps at the latest
        config.outer.optimizer = "direct"  # the best of it: docs/results/quality.md
    if algorithm == "diloco":
        config.sync.num_fragments, config.sync.overlap, config.sync.max_run_ahead = 1, 0, 0
    return config


def model(size: str, name: str = "dense") -> ConfigDict:
    """The decoder's shape, as settings of this model."""
    c = sections.model(name)
    #                                                   layers width heads kv head_dim  mlp
    c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim = {
        "tiny": (4, 128, 4, 2, 32, 352),
        "small": (8, 512, 8, 4, 64, 1408),
        "160m": (12, 768, 12, 4, 64, 3072),
        "400m": (24, 1024, 16, 8, 64, 3584),
        "1b": (20, 2048, 16, 8, 128, 5632),
        "2b": (26, 2304, 8, 4, 256, 9216),
        "5b": (32, 3072, 12, 4, 256, 12288),
        "9b": (42, 3584, 16, 8, 256, 14336),
    }[size]
    if size != "tiny":
        c.compute_dtype = "bfloat16"  # slower than float32 on CPUs
    if size in OF_ONE_ACCELERATOR:
        c.vocab_size = 32_768
        c.tie_embeddings = size == "1b"
        c.scan_layers = True  # compiles one layer, not dozens
        c.remat = "full" if size == "1b" else "dots_with_no_batch_dims_saveable"
        c.logits_chunk = 8192  # of 32,768 logits each: 1 GiB at a time
    if size in OF_MANY:
        c.vocab_size = 262_144
        c.activation = "geglu"
        c.tie_embeddings = True
        c.scan_layers = True  # compiles one layer, not dozens
        c.remat = "full"  # the activations of all layers would not fit
        c.logits_chunk = 1024 if size == "9b" else 2048  # of 262,144 logits each: 1 or 2 GiB at a time
    return c


get_comparison, get_tuning = baselines.tables(get_config, SIZES)
