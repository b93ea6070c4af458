# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which of Flint's own kernels an engine takes if nobody says otherwise.

Those are on whose answers, in a whole engine of Flint's real width on such a GPU, were
compared with a float64 reference. ``--additional-config '{"flint_kernels": true}'``
asks for all of them, and ``false`` for none; VLLM_DISABLED_KERNELS turns off one by
one.
"""

from typing import Literal, TypeAlias

from vllm.config import VllmConfig
from vllm.model_executor.layers import layernorm
from vllm.platforms import current_platform

from .ops.norm import RMSNorm

Part: TypeAlias = Literal[
    "linears",
    "attention",
    "NVFP4 experts",
    "BF16 experts",
]

OPTION = "flint_kernels"
# Compute capabilities, times ten, of the GPUs that the kernels are written for.
_CAPABILITIES = (90, 100, 103, 120, 121)
# Compute capabilities, times ten, of the GPUs of such comparisons, of all parts.
_COMPARED = (90,)


def why_off(vllm_config: VllmConfig, part: Part) -> str | None:
    """Say why an engine leaves some of Flint's kernels out, or None.

    Raises:
        ValueError: The option is neither true nor false.

    """
    options = vllm_config.additional_config
    value = options.get(OPTION) if isinstance(options, dict) else None
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"--additional-config: {OPTION} must be true or false, got {value!r}"
        )
    if value is not None:
        return None if value else f"--additional-config turns {OPTION} off"
    if cuda_capability() in _COMPARED:
        return None
    return (
        f"no engine's answers with Flint's {part} were checked on such a machine yet; "
        f"--additional-config '{{\"{OPTION}\": true}}' takes them all the same"
    )


def cuda_capability() -> int | None:
    """Return the GPU's compute capability times ten; None without a CUDA GPU."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else capability.to_int()


def why_not_gpu(capability: int | None) -> str | None:
    """Say why kernels cannot run on a GPU of such a capability, or None."""
    if capability is None:
        return "they require CUDA"
    if capability not in _CAPABILITIES:
        return "they require sm_90, sm_100, sm_103 or sm_12x"
    return None


def norm_class(vllm_config: VllmConfig) -> type[layernorm.RMSNorm]:
    """Return the RMSNorm for an engine's residual stream."""
    off = why_off(vllm_config, "attention")
    return RMSNorm if off is None else layernorm.RMSNorm
