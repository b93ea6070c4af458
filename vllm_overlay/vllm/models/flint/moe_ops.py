# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The operator through which torch.compile sees a sparse layer on Flint's kernels.

It may be captured in any CUDA graph: what it launches follows from the count of tokens
alone, which a graph fixes, padding included.
"""

import torch

from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import (
    LayerNameType,
    _resolve_layer_name,
    direct_register_custom_op,
)


def flint_sparse_mlp(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``FlintSparseMoeBlock.add_norm_and_mix``."""
    block = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    return block.add_norm_and_mix(x, residual, norm_weight, eps)


def flint_sparse_mlp_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


direct_register_custom_op(
    "flint_sparse_mlp", flint_sparse_mlp, fake_impl=flint_sparse_mlp_fake
)
