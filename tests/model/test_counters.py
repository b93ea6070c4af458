# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The counters that kernels leave at zero, through sleep and reload of an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.models.flint import model
from vllm.models.flint.ops.attention.workspace import DecodeWorkspace

NAMES = {"attention_counters", "route_counters"}


class Attention(nn.Module):
    decodes = True

    def new_workspace(self) -> DecodeWorkspace:
        return DecodeWorkspace(2, 4, 132, torch.device("cpu"))

    def prepare_kernels(self, eps: float, workspace: DecodeWorkspace) -> None:
        self.workspace = workspace


class Block(nn.Module):
    uses_kernels = True

    def prepare_kernels(self, counter: torch.Tensor) -> None:
        self.counter = counter


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Block()
        self.input_layernorm = SimpleNamespace(variance_epsilon=1e-6)


class Model(nn.Module):
    """What the hook after loading needs of a model."""

    _keep_asleep = model.FlintForCausalLM._keep_asleep
    quant_config: Any = SimpleNamespace(get_name=lambda: "fp8")
    config: Any = SimpleNamespace(quantization_config={})

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.model.norm = nn.LayerNorm(4)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(model, "FlintDecoderLayer", Layer)
    monkeypatch.setattr(model, "FlintSparseMoeBlock", Block)
    found = Model()
    record_metadata_for_reloading(found)
    model.FlintForCausalLM.process_weights_after_loading(found)
    return found


def used(prepared: Model) -> list[torch.Tensor]:
    """What the layers' kernels get."""
    layers = prepared.model.layers
    return [x.self_attn.workspace.counters for x in layers] + [
        x.mlp.counter for x in layers
    ]


def test_they_are_buffers_and_of_no_checkpoint(prepared: Model) -> None:
    buffers = dict(prepared.named_buffers())
    assert buffers.keys() == NAMES
    kept = {id(tensor) for tensor in buffers.values()}
    assert {id(tensor) for tensor in used(prepared)} == kept
    assert not NAMES & prepared.state_dict().keys()


def test_a_reload_leaves_them_where_they_are(prepared: Model) -> None:
    before = dict(prepared.named_buffers())
    initialize_layerwise_reload(prepared)
    finalize_layerwise_reload(prepared, None)
    after = dict(prepared.named_buffers())
    assert after.keys() == NAMES
    assert all(after[name] is before[name] for name in NAMES)
    assert not any(tensor.any() for tensor in used(prepared))
