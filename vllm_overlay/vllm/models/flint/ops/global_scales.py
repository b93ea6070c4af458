# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Global scales of fused linears, which need one for all their shards."""

from collections.abc import Generator, Iterable

import torch

# Shards of one fused linear, which has one global scale.
_FUSED_SHARDS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_GLOBAL_SCALE = "weight_scale_2"


def check_merged_global_scales(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Pass checkpoint tensors through, refusing unequal scales in one fused linear.

    Args:
        weights: Pairs of a checkpoint name and its tensor; global scales are named
            `<module>.weight_scale_2` and hold one value.

    Yields:
        The same pairs.

    Raises:
        ValueError: Two shards of one fused linear differ in their global scale.

    """
    first: dict[str, tuple[str, float]] = {}
    for name, tensor in weights:
        module, _, kind = name.rpartition(".")
        parent, _, shard = module.rpartition(".")
        if kind == _GLOBAL_SCALE and shard in _FUSED_SHARDS:
            fused = f"{parent}.{_FUSED_SHARDS[shard]}"
            scale = tensor.item()
            other, other_scale = first.setdefault(fused, (name, scale))
            if scale != other_scale:
                raise ValueError(
                    f"{other} is {other_scale!r} but {name} is {scale!r}: the shards "
                    f"of {fused} need one global scale. Quantize the checkpoint again "
                    "with equal scales for fused projections."
                )
        yield name, tensor
