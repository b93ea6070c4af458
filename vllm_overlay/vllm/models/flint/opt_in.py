# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether an engine is to run on Flint's own kernels.

Each kernel is tested and measured alone on an H200, but no engine has been checked with
all of them, so stock layers serve until they are asked for.
"""

from vllm.config import VllmConfig
from vllm.model_executor.layers import layernorm

from .ops.norm import RMSNorm

OPTION = "flint_kernels"
HOW_TO_ASK = (
    f"ask for all of Flint's kernels with --additional-config '{{\"{OPTION}\": true}}'"
)


def kernels_requested(vllm_config: VllmConfig) -> bool:
    """Return whether ``--additional-config`` asks for Flint's kernels.

    Raises:
        ValueError: The option is neither true nor false.

    """
    options = vllm_config.additional_config
    value = options.get(OPTION, False) if isinstance(options, dict) else False
    if not isinstance(value, bool):
        raise ValueError(
            f"--additional-config: {OPTION} must be true or false, got {value!r}"
        )
    return value


def norm_class(vllm_config: VllmConfig) -> type[layernorm.RMSNorm]:
    """Return the RMSNorm for an engine's residual stream."""
    return RMSNorm if kernels_requested(vllm_config) else layernorm.RMSNorm
