"""Dense decoder-only language models, trained with Decoupled DiLoCo.

  python -m experiments.train --config=configs/dense.py[:SIZE][,ALGORITHM] [--config.any.field=value]
  python -m experiments.compare --config=configs/dense.py[:SIZE]

SIZE
  tiny      0.8M parameters on the Python standard library's sources; under 4 minutes on 2 CPU cores (default)
  small     24M parameters; one accelerator, or a patient CPU
  2b 5b 9b  shapes in the class of the paper's models; look at them on any machine with --dry_run
ALGORITHM
  decoupled (default), streaming, diloco   presets of one machinery
  data_parallel, lone_learner              baselines: all learners' batches in one, or learner 0 alone
"""

from ml_collections import ConfigDict, config_dict

from configs import baselines, remote, virtual

SIZES = ("tiny", "small", "2b", "5b", "9b")
ALGORITHMS = ("decoupled", "streaming", "diloco", "data_parallel", "lone_learner")


def get_config(preset: str = "tiny") -> ConfigDict:
    """The settings of `SIZE`, `ALGORITHM` or `SIZE,ALGORITHM`."""
    size, algorithm = size_and_algorithm(preset, SIZES)

    config = ConfigDict()
    config.algorithm = algorithm
    config.driver = "local"  # roles as threads; remote: as processes; virtual: under a simulated clock
    config.seed = 0  # initial parameters, data order, sample

    config.model = model(size)

    config.data = ConfigDict()
    config.data.name = "stdlib_text"  # or any TFDS text data set, such as c4/en
    config.data.data_dir = config_dict.placeholder(
        str
    )  # prepared data sets; None: $TFDS_DATA_DIR, ~/tensorflow_datasets
    config.data.text_feature = "text"  # feature that holds a document's text
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.sequence_length = {"tiny": 128, "small": 512}.get(size, 2048)  # L, tokens in a row
    config.data.tokenizer = "byte"  # or sentencepiece, with the model file below
    config.data.tokenizer_model = config_dict.placeholder(str)
    config.data.shuffle = True  # a shard's documents, anew in each epoch
    config.data.interleave = 8  # documents read side by side, a row of each in turn
    config.data.prefetch = 0  # batches that a thread prepares ahead; 0: none, no thread
    config.data.held_out_pool = 4_194_304  # tokens of the eval split that held-out rows are picked from

    config.train = ConfigDict()
    config.train.steps = {"tiny": 480, "small": 4800}.get(size, 48_000)  # T, global steps
    config.train.tokens = config_dict.placeholder(int)  # budget of all learners that sets T; None: T as above
    config.train.batch_size = {"tiny": 8, "small": 16}.get(size, 128)  # rows of one learner and step
    config.train.batch_sizes = ()  # the same by learner, where they differ
    config.train.steps_in_flight = 2  # steps handed to the devices before the oldest is complete
    config.train.min_step_seconds = ()  # by learner, to play slower hardware

    config.inner = ConfigDict()  # AdamW
    config.inner.learning_rate = {"tiny": 3e-3, "small": 1e-3}.get(size, 3e-4)  # peak
    config.inner.warmup_steps = {"tiny": 40, "small": 200}.get(size, 1000)
    config.inner.final_fraction = 0.1  # share of the peak left at step T, by half a cosine
    config.inner.weight_decay = 0.1  # on matrices
    config.inner.decay_embeddings = False
    config.inner.b1 = 0.9
    config.inner.b2 = 0.95
    config.inner.eps = 1e-8
    config.inner.clip_norm = 1.0  # largest gradient norm; None: no clipping
    config.inner.accumulation = 1  # micro-batches in a step
    config.inner.z_loss = 0.0  # weight of log(Z)^2

    config.sync = sync(config.algorithm, size)
    config.outer = outer(config.algorithm)

    config.mesh = ConfigDict()  # of one learner; -1: the devices that the other axes leave
    config.mesh.data = 1 if size in ("2b", "5b", "9b") else -1
    config.mesh.fsdp = -1 if size in ("2b", "5b", "9b") else 1
    config.mesh.tensor = 1
    config.mesh.expert = 1

    config.remote = remote.section()  # the wire, of driver=remote
    config.virtual = virtual.section()  # what driver=virtual plays

    config.eval = ConfigDict()  # of the global model, on held-out text
    config.eval.every = {"tiny": 48, "small": 240}.get(size, 2400)  # global steps; 0: only at the end
    config.eval.num_batches = {"tiny": 8}.get(size, 32)
    config.eval.batch_size = 16  # rows

    config.sample = ConfigDict()  # the continuation written at the end
    config.sample.prompt = "def "
    config.sample.tokens = 160  # 0: none
    config.sample.temperature = 0.7  # 0: the likeliest token

    config.log = ConfigDict()
    config.log.every = 4  # steps between two points of a learner in TensorBoard

    config.tape = ConfigDict()
    config.tape.enabled = True  # learners and syncer write down what they are told, for experiments.replay

    config.snapshot = ConfigDict()  # of the whole run, to resume from
    config.snapshot.every = 0  # global steps between two; 0: none
    config.snapshot.keep = 2  # complete ones that are kept
    config.snapshot.timeout = 120.0  # seconds until one that is not complete is given up
    config.resume = False  # go on from the newest complete snapshot in the workdir
    config.sdc_check_every = 0  # steps between two that a learner takes twice, to see its devices err
    return config


def size_and_algorithm(preset: str, sizes: tuple[str, ...]) -> tuple[str, str]:
    """What `SIZE`, `ALGORITHM` or `SIZE,ALGORITHM` says; without a word the first size, and decoupled."""
    names = preset.split(",")
    unknown = [name for name in names if name not in sizes + ALGORITHMS]
    if unknown:
        raise ValueError(f"no preset {unknown[0]!r}; there are {', '.join(sizes + ALGORITHMS)}")
    size = next((name for name in names if name in sizes), sizes[0])
    return size, next((name for name in names if name in ALGORITHMS), "decoupled")


def model(size: str) -> ConfigDict:
    """The decoder's shape."""
    c = ConfigDict()
    c.name = "dense"
    #                                                   layers width heads kv head_dim  mlp
    c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim = {
        "tiny": (4, 128, 4, 2, 32, 352),
        "small": (8, 512, 8, 4, 64, 1408),
        "2b": (26, 2304, 8, 4, 256, 9216),
        "5b": (32, 3072, 12, 4, 256, 12288),
        "9b": (42, 3584, 16, 8, 256, 14336),
    }[size]
    large = size in ("2b", "5b", "9b")
    c.vocab_size = 262_144 if large else 259  # 259: bytes and three marks
    c.activation = "geglu" if large else "swiglu"
    c.qk_norm = True  # RMS-normalised queries and keys
    c.tie_embeddings = large  # the head is the transposed embedding
    c.rope_theta = 10_000.0  # longest rotary wavelength / 2 pi, in positions
    c.logit_softcap = config_dict.placeholder(float)  # cap * tanh(logits / cap); None: no cap
    c.norm_epsilon = 1e-6
    c.remat = large  # recompute layers in the backward pass, to save memory
    c.compute_dtype = "float32" if size == "tiny" else "bfloat16"  # parameters are float32 always
    c.attention = "xla"  # or cudnn, on GPUs
    return c


def sync(algorithm: str, size: str) -> ConfigDict:
    """Who is waited for; times in seconds unless said otherwise."""
    large = size in ("2b", "5b", "9b")
    c = ConfigDict()
    c.num_learners = 8 if large else 4  # M
    c.num_fragments = 24 if large else 12  # P
    c.interval = 24  # H, steps between two rounds of a fragment
    c.overlap = 2  # tau, steps that a round may overlap, and rounds in flight
    c.quorum = 1  # K, learners in a merge at least; None: all live ones
    c.gamma = 0.8  # share of the slack that a grace window may use
    c.max_grace = 1.0  # longest grace window, in steps
    c.mixing = 0.0  # alpha, share of its own value that a learner keeps when an update arrives
    c.max_run_ahead = config_dict.placeholder(int)  # steps past an update that is not there; None: no bound
    c.pull_timeout = 60.0  # after which a pulled fragment is given up
    c.silence_timeout = 60.0  # after which a learner is not live
    c.resend_timeout = 30.0  # after which an update not seen to arrive is sent anew
    if algorithm in ("streaming", "diloco"):
        c.quorum = config_dict.placeholder(int)
        c.max_run_ahead = c.overlap
    if algorithm == "diloco":
        c.num_fragments, c.overlap, c.max_run_ahead = 1, 0, 0
    return c


def outer(algorithm: str) -> ConfigDict:
    """How contributions become the next global model; chosen by docs/results/outer_optimizer.md."""
    c = ConfigDict()
    c.fragmentation = "balanced"  # or layer, tensor
    c.split_large = True  # cut tensors larger than a fragment's share along their rows
    c.merge = "rda"  # radial-directional averaging; or direct. Embeddings and head are merged directly always
    # nesterov, direct (rate 1, no momentum), moving_average, persistence, or an optax optimizer
    c.optimizer = "direct" if algorithm == "streaming" else "nesterov"
    c.learning_rate = 0.7  # of nesterov and moving_average
    c.momentum = 0.3
    c.target = 1.0  # of persistence: effective step, rate / (1 - momentum * rho)
    c.rho_decay = 0.8  # of persistence: weight of the past in rho, a round
    c.codec = "f32"  # what learners send: parameters in f32, or outer gradients in bf16, int8, int4
    c.error_feedback = False  # a learner's next encoding also brings what its last merged one left out
    return c


def get_comparison(size: str = "tiny") -> list[dict]:
    """Five algorithms side by side, in virtual time."""
    return baselines.comparison(get_config, size, SIZES)
