# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The sparse block around the kernels: vLLM's loading, and which launches serve what.

The kernels' places are taken by float64 functions of the contract, which read the
weights as the kernels would.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.models.flint import mlp
from vllm.models.flint.ops import moe_layer
from vllm.models.flint.ops.experts import dispatch
from vllm.models.flint.ops.gemv_weight import GemvWeight
from vllm.models.flint.ops.moe_layer import FlintBf16DecodeMoE, FlintNvfp4Experts

from contract import ops
from contract.model import sparse_block
from support.moe_layers import (
    PREFIX,
    load_block,
    make_block,
    marlin_on_cpu,
    one_rank,
    sparse_weights,
)
from support.moe_standins import (
    CONTRACT,
    COUNTER,
    EPS,
    Kernels,
    add_rms_norm,
    topk_sigmoid,
)
from tinymodel import SPECS
from tinymodel.specs import config_json

SPEC = SPECS["tiny"]


@pytest.fixture(autouse=True, scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(dispatch, "gate_up", found.gate_up)
    monkeypatch.setattr(dispatch, "down_combine", found.down_combine)
    monkeypatch.setattr(dispatch, "grouped_experts", found.grouped)
    monkeypatch.setattr(dispatch, "route", found.route)
    monkeypatch.setattr(mlp, "add_rms_norm", add_rms_norm)
    monkeypatch.setattr(mlp, "topk_sigmoid", topk_sigmoid)
    monkeypatch.setattr(mlp, "why_not_kernels", lambda facts: None)
    monkeypatch.setattr(
        moe_layer,
        "warmup_experts",
        lambda *a: found.calls.append(("warmup", a)),
    )
    monkeypatch.setattr(moe_layer, "warmup_grouped", lambda *a, **more: None)
    monkeypatch.setattr(moe_layer, "decode_form", lambda: "cvt")
    # The tiny model is narrower than the kernels take.
    monkeypatch.setattr(mlp, "why_not", lambda *a: found.shared_reason)
    # A CPU reorders BF16 experts for itself.
    monkeypatch.setattr(
        UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda *a: None
    )
    monkeypatch.setattr(
        UnquantizedFusedMoEMethod,
        "apply",
        lambda *a: found.vllms_moe(*a),
    )
    return found


def bf16_weight(layer: torch.nn.Module) -> GemvWeight | str:
    return GemvWeight.bf16(layer.weight.data)


class Layer:
    """A loaded block, and what the contract says of it."""

    def __init__(self, quantized: bool) -> None:
        family = "nvfp4" if quantized else "bf16"
        self.weights = sparse_weights(SPEC, family)
        with marlin_on_cpu():
            self.block, self.config = make_block(SPEC, quantized)
        record_metadata_for_reloading(self.block)
        load_block(self.block, self.weights)
        experts = self.block.experts.routed_experts
        experts.quant_method.process_weights_after_loading(experts)
        norm = torch.linspace(0.5, 1.5, SPEC.hidden_size).bfloat16()
        self.norm = SimpleNamespace(weight=norm, variance_epsilon=EPS)

    def prepare(self, kernels: Kernels) -> None:
        self.block.shared_expert.forward = kernels.shared(self.block)
        self.block.prepare_kernels(COUNTER)

    def reload(self) -> None:
        """Gives it other weights, as a running engine does."""
        for name, weight in self.weights.items():
            swapped = name.replace(".experts.0.", ".experts.1.")
            if swapped != name:
                self.weights[name], self.weights[swapped] = (
                    self.weights[swapped],
                    weight,
                )
        self.weights[f"{PREFIX}.gate.weight"] = -self.weights[f"{PREFIX}.gate.weight"]
        initialize_layerwise_reload(self.block)
        load_block(self.block, self.weights)
        finalize_layerwise_reload(self.block, None)

    def check(self, tokens: int) -> None:
        """Runs it through the operator; the answer is the contract's, bit by bit."""
        generator = torch.Generator().manual_seed(tokens)
        x, residual = (
            torch.randn(tokens, SPEC.hidden_size, generator=generator).bfloat16()
            for _ in range(2)
        )
        normed, total = ops.rms_norm(
            x.double(), self.norm.weight, EPS, CONTRACT, residual.double()
        )
        wanted = sparse_block(self.weights, config_json(SPEC), PREFIX, normed, CONTRACT)
        with set_forward_context(None, self.config, num_tokens=tokens):
            out, new_residual = self.block.forward_fused(x, residual, self.norm)
        assert torch.equal(out.double(), wanted)
        assert torch.equal(new_residual.double(), total)


LL = ["route", "gate_up", "down_combine"]
DECODE = ["gate_up", "down_combine"]
SHARED = ["shared"]


KINDS = [
    pytest.param(True, True, id="packed"),
    pytest.param(True, False, id="nvfp4"),
    pytest.param(False, False, id="bf16"),
]


@pytest.mark.parametrize(("quantized", "packed"), KINDS)
def test_each_path_gives_the_contracts_answer(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, quantized: bool, packed: bool
) -> None:
    monkeypatch.setattr(dispatch, "gemv_weight", bf16_weight)
    monkeypatch.setattr(moe_layer, "decode_form", lambda: "mul" if packed else "cvt")
    layer = Layer(quantized)
    layer.prepare(kernels)
    wanted = FlintNvfp4Experts if quantized else FlintBf16DecodeMoE
    method = layer.block.experts.routed_experts.quant_method
    assert type(method) is wanted
    ((_, (weights, up, down, *rest)),) = kernels.calls
    assert weights is method.weights
    assert weights.is_packed == packed
    assert (up.shape.n, down.shape.n) == (2 * 64, SPEC.hidden_size)
    assert rest == [SPEC.num_experts_per_tok, method.max_decode_tokens]
    few, most = mlp.LL_MOE_MAX_TOKENS, method.max_decode_tokens
    large = SHARED + ["grouped" if quantized else "vllm"]
    for tokens, calls in (
        (1, LL),
        (few, LL),
        (few + 1, DECODE if few < most else large),
        (most, DECODE if few < most else LL),
        (most + 1, large),
        (most + 40, large),
    ):
        kernels.calls.clear()
        layer.check(tokens)
        assert kernels.calls == calls


@pytest.mark.parametrize(("quantized", "rest"), [(True, "grouped"), (False, "vllm")])
@pytest.mark.parametrize("reason", ["its linear kernel", "its shape"])
def test_shared_expert_apart(
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    quantized: bool,
    rest: str,
) -> None:
    """Its layers then serve any count of tokens."""
    if reason == "its shape":
        monkeypatch.setattr(dispatch, "gemv_weight", bf16_weight)
        kernels.shared_reason = reason
    layer = Layer(quantized)
    layer.prepare(kernels)
    assert kernels.calls[0][1][1:3] == (None, None)
    for tokens, calls in ((1, SHARED + DECODE), (65, [*SHARED, rest])):
        kernels.calls.clear()
        layer.check(tokens)
        assert kernels.calls == calls


def test_torch_compile_sees_one_operator(kernels: Kernels) -> None:
    """Without a break, with outputs of the described shape and type."""
    layer = Layer(quantized=True)
    layer.prepare(kernels)
    tokens = 3
    given = [torch.randn(tokens, SPEC.hidden_size).bfloat16() for _ in range(2)]
    compiled = torch.compile(
        lambda *rows: layer.block.forward_fused(*rows, layer.norm),
        backend="aot_eager",
        fullgraph=True,
    )
    with set_forward_context(None, layer.config, num_tokens=tokens):
        wanted = layer.block.forward_fused(*given, layer.norm)
        found = compiled(*given)
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


def test_experts_behind_vllms_router(kernels: Kernels) -> None:
    """Weights come in FP32 and are rounded, as the contract has it."""
    layer = Layer(quantized=True)
    experts = layer.block.experts.routed_experts
    x = torch.randn(3, SPEC.hidden_size).bfloat16()
    ids = torch.tensor([[0, 3], [5, 1], [7, 2]])
    scores = torch.rand(3, 2)
    method = experts.quant_method
    assert not method.is_monolithic
    out = method.apply(experts, x, scores, ids, None, None)
    rounded = scores.bfloat16().float()
    wanted = kernels.grouped(x, ids.int(), rounded, method.weights, None)
    assert torch.equal(out, wanted)


def test_one_copy_of_the_weights(kernels: Kernels) -> None:
    """Codes and BF16 weights are the parameters'; so are the new scales."""
    experts = Layer(quantized=True).block.experts.routed_experts
    weights = experts.quant_method.weights
    for name, tensor in (
        ("w13_weight", weights.w1),
        ("w2_weight", weights.w2),
        ("w13_weight_scale", weights.w1_scale),
        ("w2_weight_scale", weights.w2_scale),
        ("w13_weight_scale_2", weights.alpha1),
        ("w2_weight_scale_2", weights.alpha2),
    ):
        assert getattr(experts, name).data_ptr() == tensor.data_ptr()
    experts = Layer(quantized=False).block.experts.routed_experts
    weights = experts.quant_method.weights
    assert experts.w13_weight.data_ptr() == weights.w1.data_ptr()
    assert experts.w2_weight.data_ptr() == weights.w2.data_ptr()


@pytest.mark.parametrize(("quantized", "packed"), KINDS)
def test_reload_keeps_one_copy_where_graphs_read_it(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, quantized: bool, packed: bool
) -> None:
    monkeypatch.setattr(dispatch, "gemv_weight", bf16_weight)
    monkeypatch.setattr(moe_layer, "decode_form", lambda: "mul" if packed else "cvt")
    # A CPU reorders dense weights for itself.
    monkeypatch.setattr(
        UnquantizedLinearMethod, "process_weights_after_loading", lambda *a: None
    )
    layer = Layer(quantized)
    layer.prepare(kernels)
    experts = layer.block.experts.routed_experts
    method = experts.quant_method
    before = vars(method.weights).copy()
    layer.reload()
    for name, tensor in before.items():
        assert getattr(method.weights, name) is tensor
    assert experts.w13_weight.data_ptr() == method.weights.w1.data_ptr()
    assert experts.w2_weight.data_ptr() == method.weights.w2.data_ptr()
    for tokens in (1, mlp.LL_MOE_MAX_TOKENS + 1, method.max_decode_tokens + 1):
        layer.check(tokens)


def test_dummy_scales_are_equal(kernels: Kernels) -> None:
    """As --load-format dummy makes them, gate's and up's random ones would differ."""
    with marlin_on_cpu():
        block, _ = make_block(SPEC, quantized=True)
    experts = block.experts.routed_experts
    for parameter in experts.parameters():
        initialize_single_dummy_weight(parameter)
    experts.quant_method.process_weights_after_loading(experts)
    assert (experts.w13_weight_scale_2 > 0).all()


def test_unequal_global_scales_are_named(kernels: Kernels) -> None:
    layer = Layer(quantized=True)
    experts = layer.block.experts.routed_experts
    scale = torch.ones(SPEC.num_experts, 2)
    scale[3, 1] = 0.5
    experts.w13_weight_scale_2 = torch.nn.Parameter(scale, requires_grad=False)
    with pytest.raises(ValueError) as error:
        experts.quant_method.process_weights_after_loading(experts)
    assert f"{PREFIX}.experts.3.gate_proj.weight_scale_2 is 1.0" in str(error.value)
    assert f"{PREFIX}.experts.3.up_proj.weight_scale_2 is 0.5" in str(error.value)


def test_left_to_vllm_without_the_kernels(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "why_not_kernels", lambda facts: "of a reason")
    block, config = make_block(SPEC, quantized=False)
    assert not block.uses_kernels
    method = block.experts.routed_experts.quant_method
    assert type(method) is UnquantizedFusedMoEMethod
    assert PREFIX not in config.compilation_config.static_forward_context
    block.prepare_kernels(COUNTER)
    assert kernels.calls == []
