# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The entries to Flint's sparse layers; ``experts`` holds what is behind them."""

from .experts.dispatch import (
    BF16_DECODE_MAX_TOKENS,
    DECODE_MAX_TOKENS,
    LL_MOE_MAX_TOKENS,
    flint_moe,
    flint_moe_bf16_decode,
    flint_moe_ll,
    ll_weights_from_layers,
)
from .experts.route import make_route_counter, route, topk_sigmoid
from .experts.weights import FlintMoEWeights, LLMoEWeights
from .moe_layer import FlintBf16DecodeMoE, FlintNvfp4Experts

__all__ = [
    "BF16_DECODE_MAX_TOKENS",
    "DECODE_MAX_TOKENS",
    "FlintBf16DecodeMoE",
    "FlintMoEWeights",
    "FlintNvfp4Experts",
    "LLMoEWeights",
    "LL_MOE_MAX_TOKENS",
    "flint_moe",
    "flint_moe_bf16_decode",
    "flint_moe_ll",
    "ll_weights_from_layers",
    "make_route_counter",
    "route",
    "topk_sigmoid",
]
