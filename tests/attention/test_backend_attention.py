# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Sinks that FlashAttention gets in BF16, through sleep and reload of an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.models.flint.backend_attention import BackendAttention

FIRST, SECOND = torch.tensor([0.1, -3.3, 9.7]), torch.tensor([2.6, 0.3, -8.1])


class Layer(nn.Module):
    """What Flint's attention has of sinks; the backend is a stand-in."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.sinks = nn.Parameter(FIRST.to(dtype), requires_grad=False)
        self.attn: Any = BackendAttention.__new__(BackendAttention)
        nn.Module.__init__(self.attn)
        self.attn.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.attn.impl = SimpleNamespace(sinks=self.sinks)
        record_metadata_for_reloading(self)
        self.attn.process_weights_after_loading(torch.bfloat16)


@pytest.fixture(autouse=True)
def stock_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "process_weights_after_loading", lambda *args: None)


def test_flash_attention_gets_a_rounded_copy_that_sleep_keeps() -> None:
    layer = Layer("FLASH_ATTN", torch.float32)
    sinks = layer.attn.impl.sinks
    assert torch.equal(sinks, FIRST.bfloat16())
    assert [buffer is sinks for buffer in layer.buffers()] == [True]
    assert layer.state_dict().keys() == {"sinks"}


def test_the_copy_follows_a_reload_in_place() -> None:
    layer = Layer("FLASH_ATTN", torch.float32)
    sinks = layer.attn.impl.sinks
    address = sinks.data_ptr()
    initialize_layerwise_reload(layer)
    layer.sinks.weight_loader(layer.sinks, SECOND)
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))
    assert layer.attn.impl.sinks.data_ptr() == address
    assert torch.equal(layer.sinks, SECOND)
    assert torch.equal(layer.attn.impl.sinks, SECOND.bfloat16())
    assert [buffer.data_ptr() for buffer in layer.buffers()] == [address]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("TRITON_ATTN", torch.float32), ("FLASH_ATTN", torch.bfloat16)],
)
def test_others_get_the_layers_own(backend: str, dtype: torch.dtype) -> None:
    layer = Layer(backend, dtype)
    assert layer.attn.impl.sinks is layer.sinks
    assert not list(layer.buffers())
