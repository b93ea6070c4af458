# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What Flint's kernels need to know about the current GPU, asked in one place."""

import functools
from dataclasses import dataclass

from vllm.platforms import current_platform


@dataclass(frozen=True)
class Gpu:
    """A GPU's compute capability and how many SMs it has."""

    capability: tuple[int, int]
    sms: int


@functools.cache
def current_gpu() -> Gpu:
    """Describe the current GPU; raises RuntimeError where there is none."""
    capability = current_platform.get_device_capability()
    if capability is None:
        raise RuntimeError("Flint's kernels need a CUDA GPU, and there is none")
    return Gpu(
        (capability.major, capability.minor), current_platform.num_compute_units()
    )
