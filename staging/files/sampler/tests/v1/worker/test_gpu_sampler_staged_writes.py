# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sampler copies its states after a request was added, and only then."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

MAX_NUM_REQS = 4


class CPUUvaBuffer:
    """Host memory that is read in place, without a GPU."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu[:n]


class CountingProcessor(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def apply_staged_writes(self) -> None:
        self.calls += 1

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise AssertionError("nothing is sampled in this test")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[UvaBackedTensor]:
    """Tensors in the order in which they were copied."""
    tensors: list[UvaBackedTensor] = []
    copy_to_uva = UvaBackedTensor.copy_to_uva

    def record(self: UvaBackedTensor, n: int | None = None) -> torch.Tensor:
        tensors.append(self)
        return copy_to_uva(self, n)

    monkeypatch.setattr(buffer_utils, "UvaBuffer", CPUUvaBuffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    monkeypatch.setattr(UvaBackedTensor, "copy_to_uva", record)
    return tensors


def make_sampler(*processors: LogitsProcessor) -> Sampler:
    device = torch.device("cpu")
    config: Any = SimpleNamespace(reasoning_config=None)
    req_states = RequestState(
        max_num_reqs=MAX_NUM_REQS,
        max_model_len=64,
        max_num_batched_tokens=16,
        num_speculative_steps=1,
        vocab_size=128,
        device=device,
    )
    return Sampler(
        vllm_config=config,
        max_num_reqs=MAX_NUM_REQS,
        vocab_size=128,
        device=device,
        req_states=req_states,
        custom_logits_processors=processors,
    )


def test_states_are_copied_once_after_each_new_request(copied):
    sampler = make_sampler()
    for req_idx, temperature in enumerate((0.5, 0.7)):
        sampler.add_request(req_idx, SamplingParams(temperature=temperature))
        copied.clear()
        sampler.apply_staged_writes()
        assert len(copied) == len(set(map(id, copied))) == 15
        for tensor in copied:
            assert torch.equal(tensor.gpu, tensor.cpu)
        copied.clear()
        sampler.apply_staged_writes()
        assert not copied


def test_custom_processors_are_called_at_every_step(copied):
    processor = CountingProcessor()
    sampler = make_sampler(processor)
    for step in range(4):
        if step == 2:
            sampler.add_request(0, SamplingParams())
        sampler.apply_staged_writes()
        assert processor.calls == step + 1


def test_copies_that_raised_are_made_up_for(copied, monkeypatch):
    sampler = make_sampler()
    sampler.add_request(0, SamplingParams())

    def fail() -> None:
        raise RuntimeError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(sampler.penalties_state, "apply_staged_writes", fail)
        sampler.apply_staged_writes()
    copied.clear()
    sampler.apply_staged_writes()
    assert len(copied) == 15
