# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Every tensor of a Flint model: names in both formats, shape and role."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinymodel.specs import TinySpec


@dataclass(frozen=True)
class TensorDef:
    """One tensor of the safetensors checkpoint.

    Attributes:
        name: Its safetensors name.
        gguf: Its GGUF name; the experts of a layer share one.
        shape: Its shape, output channels first.
        role: Which distribution `weights` draws it from.
        layer: Its layer, or None outside the layers.
        expert: Its place in the GGUF stack, or None if it is not stacked.
        fused: What it shares a tensor scale with: layers that an engine fuses
            into one matrix must agree on the scale.
    """

    name: str
    gguf: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    expert: int | None = None
    fused: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether an NVFP4 checkpoint quantizes this tensor."""
        return self.role in MATRIX_ROLES


MATRIX_ROLES = frozenset(
    ("query", "key", "value", "attn_out", "gate", "up", "down", "head")
)


def tensor_defs(spec: TinySpec) -> Iterator[TensorDef]:
    """Yields the tensors of `spec`, in the order the files hold them."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield TensorDef(
        "model.embed_tokens.weight", "token_embd.weight", (vocab, hidden), "embed"
    )
    for layer in range(spec.num_hidden_layers):
        yield from _attention(spec, layer)
        yield from (
            _sparse(spec, layer)
            if spec.is_sparse(layer)
            else _mlp(
                f"model.layers.{layer}.mlp",
                f"blk.{layer}.ffn_",
                "",
                hidden,
                spec.intermediate_size,
                layer,
            )
        )
    yield TensorDef("model.norm.weight", "output_norm.weight", (hidden,), "norm")
    name = "lm_head.weight"
    yield TensorDef(name, "output.weight", (vocab, hidden), "head", fused=name)


def _attention(spec: TinySpec, layer: int) -> Iterator[TensorDef]:
    hf, gg = f"model.layers.{layer}", f"blk.{layer}"
    hidden, dim = spec.hidden_size, spec.head_dim
    q_width = spec.num_attention_heads * dim
    kv_width = spec.num_key_value_heads * dim
    for norm, short in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        yield TensorDef(
            f"{hf}.{norm}.weight", f"{gg}.{short}.weight", (hidden,), "norm", layer
        )
    for letter, role, width in (
        ("q", "query", q_width),
        ("k", "key", kv_width),
        ("v", "value", kv_width),
    ):
        yield TensorDef(
            f"{hf}.self_attn.{letter}_proj.weight",
            f"{gg}.attn_{letter}.weight",
            (width, hidden),
            role,
            layer,
            fused=f"{hf}.qkv",
        )
    name = f"{hf}.self_attn.o_proj.weight"
    shape = (hidden, q_width)
    yield TensorDef(
        name, f"{gg}.attn_output.weight", shape, "attn_out", layer, fused=name
    )
    for letter in "qk":
        yield TensorDef(
            f"{hf}.self_attn.{letter}_norm.weight",
            f"{gg}.attn_{letter}_norm.weight",
            (dim,),
            "head_norm",
            layer,
        )
    yield TensorDef(
        f"{hf}.self_attn.softmax_offset",
        f"{gg}.attn_sinks.weight",
        (spec.num_attention_heads,),
        "sinks",
        layer,
    )


def _mlp(
    hf: str,
    gg: str,
    suffix: str,
    hidden: int,
    inner: int,
    layer: int,
    expert: int | None = None,
) -> Iterator[TensorDef]:
    for kind in ("gate", "up", "down"):
        name = f"{hf}.{kind}_proj.weight"
        yield TensorDef(
            name,
            f"{gg}{kind}{suffix}.weight",
            (hidden, inner) if kind == "down" else (inner, hidden),
            kind,
            layer,
            expert,
            fused=name if kind == "down" else f"{hf}.gate_up",
        )


def _sparse(spec: TinySpec, layer: int) -> Iterator[TensorDef]:
    hf, gg = f"model.layers.{layer}.mlp", f"blk.{layer}.ffn_"
    hidden = spec.hidden_size
    shape = (spec.num_experts, hidden)
    yield TensorDef(f"{hf}.gate.weight", f"{gg}gate_inp.weight", shape, "router", layer)
    for expert in range(spec.num_experts):
        yield from _mlp(
            f"{hf}.experts.{expert}",
            gg,
            "_exps",
            hidden,
            spec.moe_intermediate_size,
            layer,
            expert,
        )
    yield from _mlp(
        f"{hf}.shared_expert",
        gg,
        "_shexp",
        hidden,
        spec.shared_expert_intermediate_size,
        layer,
    )
