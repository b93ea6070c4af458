# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Operators through which torch.compile sees a layer of Flint's attention kernels.

``flint_qkv`` may be captured in any CUDA graph: it reads the slot mapping and the cache
from buffers that stay in place. ``flint_attention_with_output`` decides by the batch's
metadata, so piecewise graphs are split there, as at vLLM's own attention.
"""

import torch

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import (
    maybe_transfer_kv_layer,
)
from vllm.utils.torch_utils import (
    LayerNameType,
    _resolve_layer_name,
    direct_register_custom_op,
)

# The vLLM layer of a Flint layer "NAME" is "NAME.attn".
ATTENTION_SUFFIX = ".attn"
_SPLITTING_OP = "vllm::flint_attention_with_output"


def split_graphs_at_attention(config: CompilationConfig) -> None:
    """Keep attention out of piecewise CUDA graphs, where the user did not ask else."""
    if config.splitting_ops and _SPLITTING_OP not in config.splitting_ops:
        config.splitting_ops.append(_SPLITTING_OP)


def _layer(name: str):
    layers = get_forward_context().no_compile_layers
    return layers[name.removesuffix(ATTENTION_SUFFIX)]


def flint_qkv(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    q_size: int,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``FlintAttention.project``; q comes as [num_tokens, q_size]."""
    name = _resolve_layer_name(layer_name)
    _, _, kv_cache, slot_mapping = get_attention_context(name)
    q, new_residual = _layer(name).project(
        x, residual, norm_weight, eps, positions, kv_cache, slot_mapping
    )
    return q.view(x.shape[0], q_size), new_residual


def flint_qkv_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    q_size: int,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((x.shape[0], q_size)), x.new_empty(x.shape)


@eager_break_during_capture
@maybe_transfer_kv_layer
def flint_attention_with_output(
    query: torch.Tensor, output: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Run ``FlintAttention.attend``."""
    name = _resolve_layer_name(layer_name)
    metadata, _, kv_cache, _ = get_attention_context(name)
    _layer(name).attend(query, kv_cache, metadata, output)


direct_register_custom_op("flint_qkv", flint_qkv, fake_impl=flint_qkv_fake)
direct_register_custom_op(
    "flint_attention_with_output",
    flint_attention_with_output,
    mutates_args=["output"],
    fake_impl=lambda query, output, layer_name: None,
)
