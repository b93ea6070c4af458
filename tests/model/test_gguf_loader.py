# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Where the loader has a GGUF's weights repacked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader  # noqa: F401  (imports the next)
from vllm.models.flint import gguf_loader
from vllm.models.flint.configs import FlintConfig

from tinymodel import SPECS
from tinymodel.specs import config_json


@pytest.mark.parametrize(
    ("asked", "parameters", "device"),
    [(None, "cpu", "cuda"), ("cuda:1", "cpu", "cuda:1"), (None, "meta", "cpu")],
    ids=["load", "load elsewhere", "reload"],
)
def test_device(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, parameters: str, device: str
) -> None:
    """On the GPU, but not beside a KV cache: a reload keeps a layer's weights."""
    given: list[Any] = []

    def weights(*_: Any, device: Any, **__: Any) -> list[tuple[str, torch.Tensor]]:
        given.append(device)
        return []

    loader = gguf_loader.FlintGGUFModelLoader
    cuda = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(gguf_loader, "gguf_nvfp4_weights_iterator", weights)
    monkeypatch.setattr(gguf_loader, "current_platform", cuda)
    monkeypatch.setattr(loader, "_path", lambda *_: "model.gguf")
    config: Any = SimpleNamespace(
        hf_config=FlintConfig(**config_json(SPECS["tiny"])), dtype=torch.bfloat16
    )
    model = nn.Linear(2, 2, device=parameters)
    found = loader(LoadConfig(device=asked)).get_all_weights(config, model)
    assert list(found) == []
    assert given == [device]
