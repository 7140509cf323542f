"""Tests see eight simulated CPU devices and compile quickly rather than well; set before JAX starts."""

import os

import hypothesis

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
