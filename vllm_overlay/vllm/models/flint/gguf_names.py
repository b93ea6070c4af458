# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's GGUF tensor names in terms of its safetensors names."""

import regex as re

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_sinks.weight": "self_attn.softmax_offset",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps.weight": "mlp.experts.{}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{}.down_proj.weight",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


def checkpoint_name(gguf_name: str) -> str | None:
    """Translate a GGUF weight's name.

    Args:
        gguf_name: Name in the GGUF file, such as `blk.3.ffn_up_exps.weight`.

    Returns:
        The safetensors name, in which `{}` stands for the expert's index where the
        GGUF stacks experts; None for a name that Flint does not have.

    """
    if gguf_name in _MODEL:
        return _MODEL[gguf_name]
    block = _BLOCK.fullmatch(gguf_name)
    if block is None or block[2] not in _LAYER:
        return None
    return f"model.layers.{block[1]}.{_LAYER[block[2]]}"


def scale_name(gguf_name: str) -> str:
    """Name the companion that holds an NVFP4 weight's global scale."""
    return f"{gguf_name.removesuffix('.weight')}.scale"
