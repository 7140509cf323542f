"""Vision transformers that classify images, trained with Decoupled DiLoCo.

  python -m experiments.train --config=configs/vit.py[:SIZE][,ALGORITHM][,EXCHANGE] [--config.FIELD=VALUE]
  python -m experiments.compare --config=configs/vit.py[:SIZE]

SIZE
  tiny    0.1M parameters on scikit-learn's handwritten digits; 98% of those held out, under 4 minutes on
          2 CPU cores (default)
  small   ViT-S/4 on cifar10: 21M parameters, 32x32 in patches of 4; one accelerator
  base    ViT-B/16 on imagenet2012: 86M parameters, 224x224 in patches of 16; look at it with --dry_run
ALGORITHM as in configs/dense.py

Any TFDS data set of labelled images: --config.data.name=mnist --config.model.image_size=28. A token of the
figures is an image.
"""

from ml_collections import ConfigDict

from configs import baselines, dense, sections
from ddiloco.data.settings import ClassificationConfig

SIZES = ("tiny", "small", "base")


def get_config(preset: str = "tiny") -> ConfigDict:
    """The settings of `SIZE,ALGORITHM,EXCHANGE`; any of them may be left out."""
    size, algorithm, exchange = sections.words(preset, SIZES, dense.ALGORITHMS, dense.EXCHANGES)
    config = dense.begin(f"{'tiny' if size == 'tiny' else 'small'},{algorithm},{exchange}")
    config.model = model(size)
    config.data = data(size)
    del config.sample  # there is nothing to show

    config.train.steps = {"tiny": 1440, "small": 20_000, "base": 75_000}[size]
    config.train.batch_size = {"tiny": 32, "small": 128, "base": 1024}[size]  # images of one learner and step
    config.inner.learning_rate = {"tiny": 3e-3, "small": 1e-3, "base": 1e-3}[size]
    config.inner.warmup_steps = {"tiny": 40, "small": 1000, "base": 2500}[size]
    config.inner.b2 = 0.95 if size == "tiny" else 0.999
    config.eval.every = {"tiny": 144, "small": 500, "base": 2500}[size]
    config.eval.batch_size = 64 if size == "tiny" else 256
    config.eval.num_batches = {"tiny": 6, "small": 40, "base": 40}[size]
    return config


def model(size: str) -> ConfigDict:
    """The transformer's shape."""
    c = sections.model("vit")
    #                                          image patch channels classes
    c.image_size, c.patch_size, c.channels, c.num_classes = {
        "tiny": (8, 2, 1, 10),
        "small": (32, 4, 3, 10),
        "base": (224, 16, 3, 1000),
    }[size]
    #                                          layers width heads mlp
    c.num_layers, c.model_dim, c.num_heads, c.mlp_dim = {
        "tiny": (4, 64, 4, 128),
        "small": (12, 384, 6, 1536),
        "base": (12, 768, 12, 3072),
    }[size]
    c.positions = "learned" if size == "base" else "sincos"  # the latter fixed, in two dimensions
    c.pooling = "token" if size == "base" else "mean"  # what the head reads
    c.pixel_mean, c.pixel_std = {  # by channel, of pixels in [0, 1]
        "tiny": ((0.3,), (0.38,)),
        "small": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        "base": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }[size]
    if size != "tiny":
        c.compute_dtype = "bfloat16"  # slower than float32 on CPUs
    return c


def data(size: str) -> ConfigDict:
    """Which images, and how they are augmented."""
    c = sections.section(ClassificationConfig)
    c.name = {"tiny": "digits", "small": "cifar10", "base": "imagenet2012"}[size]  # or any TFDS name
    c.eval_split = "validation" if size == "base" else "test"
    c.padding = {"tiny": 1, "small": 4, "base": 0}[size]
    c.crop = "padded" if size == "small" else "resized"
    c.smallest_area = 0.5 if size == "tiny" else 0.08  # less of a digit could be of another
    c.flip = size != "tiny"  # a digit mirrored is none
    c.central_share = 0.875 if size == "base" else 1.0
    c.threads, c.prefetch = (0, 0) if size == "tiny" else (16, 2)  # decoding takes longer than a step
    return c


get_comparison, get_tuning = baselines.tables(get_config, SIZES)
