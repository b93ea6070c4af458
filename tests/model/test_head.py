# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which heads give FP32 logits from BF16 weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.models.flint import model


def head(quant_method: object) -> nn.Module:
    found = nn.Module()
    found.quant_method = quant_method
    return found


@pytest.mark.parametrize(
    ("lm_head", "invariant", "dtype"),
    [
        (head(UnquantizedEmbeddingMethod()), "0", torch.float32),
        # vLLM's own GEMM adds in an order that does not depend on the batch.
        (head(UnquantizedEmbeddingMethod()), "1", None),
        (head(object()), "0", None),
        (PPMissingLayer(), "0", None),
    ],
    ids=["bf16", "batch invariant", "quantized", "another stage's"],
)
def test_logits_of_a_bf16_head_are_fp32(
    monkeypatch: pytest.MonkeyPatch, lm_head: nn.Module, invariant: str, dtype: Any
) -> None:
    cuda = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(model, "current_platform", cuda)
    monkeypatch.setattr(model, "install_flint_dense_kernels", lambda _: 0)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    served: Any = SimpleNamespace(
        lm_head=lm_head, logits_processor=SimpleNamespace(head_dtype=None)
    )
    model.FlintForCausalLM._take_flint_linears(served)
    assert served.logits_processor.head_dtype == dtype
