# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The sampler of vLLM's V2 runner on a CPU, where it has no pinned memory."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

SLOTS = 4


class HostBuffer:
    """A buffer whose GPU view is its memory, as with UVA."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        """Returns the first `n` elements, or all."""
        return self.cpu[:n]


def use_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets host memory stand for pinned memory."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)


def make_sampler(
    vocab_size: int, *custom: LogitsProcessor, trace: bool = False
) -> Sampler:
    """Returns vLLM's own, for `SLOTS` requests; `use_host_memory` goes before it."""
    device = torch.device("cpu")
    states = RequestState(
        max_num_reqs=SLOTS,
        max_model_len=64,
        max_num_batched_tokens=16,
        num_speculative_steps=1,
        vocab_size=vocab_size,
        device=device,
    )
    tokens = dict.fromkeys(
        (
            "reasoning_start_token_ids",
            "reasoning_end_token_ids",
            "natural_reasoning_end_token_ids",
        ),
        [9],
    )
    config: Any = SimpleNamespace(reasoning_config=SimpleNamespace(**tokens))
    return Sampler(
        vllm_config=config,
        max_num_reqs=SLOTS,
        vocab_size=vocab_size,
        device=device,
        req_states=states,
        enable_trace_replay=trace,
        custom_logits_processors=custom,
    )
