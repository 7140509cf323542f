"""Installs ddiloco; `requirements.lock` pins the versions that the tests ran with."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="ddiloco",
    version="0.2.0",
    description="Decoupled DiLoCo: pre-training one model with many independent learners, in JAX",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["ddiloco*", "experiments*", "configs*"]),
    entry_points={"console_scripts": ["ddiloco=experiments.__main__:main"]},
    package_data={
        "": ["*.proto", "py.typed"],
        "ddiloco.dashboard": ["*.css", "*.html", "*.js"],
        "ddiloco.launch": ["templates/*"],
        "experiments.examples": ["*.ipynb"],
    },
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "array_record>=0.8",
        "etils[epath]>=1.12",
        "flax>=0.12",
        "importlib_resources>=6",
        "grain>=0.2.15",
        "grpcio>=1.70",
        "jax>=0.9",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "ml_collections>=1.0",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30",
        "pandas>=2.2",
        "pillow>=11",
        "prometheus_client>=0.21",
        "protobuf>=7.35.1",  # that wire_pb2.py was generated for
        "safetensors>=0.5",
        "scikit-learn>=1.5",
        "sentencepiece>=0.2",
        "scipy>=1.11",
        "starlette>=0.40",
        "tensorboardX>=2.6",
        "tensorflow-datasets>=4.9.9",
        "uvicorn>=0.30",
    ],
    extras_require={
        "test": [
            "axe-core-python>=0.1",  # of which only the script is used, in whatever Chromium there is
            "cryptography>=42",
            "grpcio-tools>=1.70",
            "httpx>=0.27",
            "hypothesis>=6.100",
            "jsonschema>=4",
            "mypy>=1.15",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "pyyaml>=6",
            "ruff>=0.9",
            "setuptools>=68",  # which makes the package
            "tokenizers>=0.20",
        ],
        "receipts": ["cryptography>=42"],
        "privacy": ["dp-accounting>=0.6", "jax-privacy>=2.0"],  # both need attrs<24
        "gpu": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
        "wandb": ["wandb>=0.20"],
        "mlflow": ["mlflow-skinny>=3"],
        "ray": ["ray>=2.50"],
        "huggingface": ["torch>=2.6", "transformers>=4.51"],  # that tests hold exported weights against
        "tpu_compiler": ["libtpu>=0.0.52"],  # which compiles for TPUs on machines without
    },
)
