"""Peak performance of the chips that this package is compiled for, from their makers' pages."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator, as a JAX device."""

    kind: str  # the `device_kind` of its JAX device
    hbm_bytes: float  # of its memory, what a compiled program may use
    peak_flops: float  # dense bfloat16 operations a second
    hbm_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second of one interconnect link, one way
    torus_axes: int  # axes of the interconnect, each with two links at a chip
    dcn_bandwidth: float  # bytes a second that a chip sends to other slices


# From cloud.google.com/tpu/docs/v5e, v5p and v6e; a link has the chip's interconnect over links and ways, a
# chip of v5e and v6e its pod's data-center network over 256 chips. HBM is what libtpu 0.0.52 leaves to a
# program; the pages say 16 GB, 95 GiB and 32 GB.
CHIPS: dict[str, Chip] = {
    "v5e": Chip("TPU v5 lite", 15.75 * 2**30, 197e12, 819e9, 400e9 / 4 / 2, 2, 3.125e9),
    "v5p": Chip("TPU v5", 95.74 * 2**30, 459e12, 2765e9, 1200e9 / 6 / 2, 3, 6.25e9),
    "v6e": Chip("TPU v6 lite", 31.25 * 2**30, 918e12, 1638e9, 800e9 / 4 / 2, 2, 12.5e9),
}

# Dense bfloat16 operations a second of other accelerators, by what their `device_kind` holds; the first that
# fits counts. TPU v4: cloud.google.com/tpu/docs/v4. GPUs: NVIDIA's data sheets, which give twice as many with
# sparsity; those with PCIe, and two of them linked (NVL), are slower than those in SXM boards.
_OTHER_PEAKS: tuple[tuple[str, float], ...] = (
    (r"^TPU v4$", 275e12),
    (r"^TPU v5p$", 459e12),
    (r"B200", 2250e12),
    (r"H200 NVL", 835e12),
    (r"H200", 989e12),
    (r"H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H100", 989e12),
    (r"A100", 312e12),
)


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 operations a second of a JAX device of this kind; None: not known, as of a CPU."""
    for chip in CHIPS.values():
        if chip.kind == kind:
            return chip.peak_flops
    return next((peak for pattern, peak in _OTHER_PEAKS if re.search(pattern, kind)), None)
