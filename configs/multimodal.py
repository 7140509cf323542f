"""Text and vision in one decoder that captions images, trained with Decoupled DiLoCo.

  python -m experiments.train --config=configs/multimodal.py[:SIZE][,ALGORITHM] [--config.any.field=value]
  python -m experiments.compare --config=configs/multimodal.py[:SIZE]

SIZE
  tiny    0.5M parameters; canvases of one to three handwritten digits, in words: "four two seven"; 94% exact
          match, some 4 minutes on 2 CPU cores (default)
  small   24M parameters, the same of mnist; one accelerator
ALGORITHM as in configs/dense.py

Scored by exact match of greedy decoding on canvases of held-out digits (eval_accuracy), and nats a byte.
"""

from ml_collections import ConfigDict, config_dict

from configs import baselines, dense

SIZES = ("tiny", "small")


def get_config(preset: str = "tiny") -> ConfigDict:
    """The settings of `SIZE`, `ALGORITHM` or `SIZE,ALGORITHM`."""
    size, algorithm = dense.size_and_algorithm(preset, SIZES)
    config = dense.get_config(f"{size},{algorithm}")
    config.model = model(size)
    config.data = data(size)
    config.sample = ConfigDict()
    config.sample.images = 6  # held-out canvases captioned at the end; 0: none

    config.train.steps = {"tiny": 1600, "small": 10_000}[size]
    config.train.batch_size = {"tiny": 16, "small": 64}[size]  # canvases of one learner and step
    config.inner.warmup_steps = {"tiny": 100, "small": 500}[size]
    config.eval.every = {"tiny": 160, "small": 500}[size]
    config.eval.batch_size = 64
    config.eval.num_batches = {"tiny": 6, "small": 40}[size]
    return config


def model(size: str) -> ConfigDict:
    """The decoder's shape, and the images that it reads."""
    c = dense.model(size)
    c.name = "captioner"
    if size == "tiny":
        c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim = 4, 96, 4, 2, 24, 256
    c.image_height, c.image_width, c.patch_size = {"tiny": (12, 32, 4), "small": (32, 96, 8)}[size]
    c.channels = 1
    c.pixel_mean, c.pixel_std = (0.15,), (0.3,)  # of pixels in [0, 1]
    return c


def data(size: str) -> ConfigDict:
    """Which digits, and how many on a canvas."""
    c = ConfigDict()
    c.name = {"tiny": "digits", "small": "mnist"}[size]  # or any TFDS name with labels 0 to 9
    c.data_dir = config_dict.placeholder(str)  # None: $TFDS_DATA_DIR, ~/tensorflow_datasets
    c.image_feature = "image"
    c.label_feature = "label"
    c.train_split = "train"
    c.eval_split = "test"
    c.fewest_digits, c.most_digits = 1, 3
    c.shuffle = True  # a shard's digits, anew in each epoch
    c.keep = True  # decoded images stay in memory
    c.threads = 0  # that make the canvases of a batch; 0: only the one that asks
    c.prefetch = 0  # batches that a thread prepares ahead; 0: none, no thread
    return c


def get_comparison(size: str = "tiny") -> list[dict]:
    """Five algorithms side by side, in virtual time."""
    return baselines.comparison(get_config, size, SIZES)
