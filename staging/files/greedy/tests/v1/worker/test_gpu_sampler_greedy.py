# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches of greedy requests take the argmax."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

MAX_NUM_REQS = 4
VOCAB_SIZE = 2500
GREEDY = SamplingParams(temperature=0.0)


class CPUUvaBuffer:
    """Host memory that is read in place, without a GPU."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu[:n]


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    monkeypatch.setattr(buffer_utils, "UvaBuffer", CPUUvaBuffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    monkeypatch.setattr(
        sampler_module,
        "get_num_sampled_and_rejected",
        lambda ones, *args: (ones, torch.zeros_like(ones)),
    )
    device = torch.device("cpu")
    config: Any = SimpleNamespace(reasoning_config=None)
    req_states = RequestState(
        max_num_reqs=MAX_NUM_REQS,
        max_model_len=64,
        max_num_batched_tokens=16,
        num_speculative_steps=1,
        vocab_size=VOCAB_SIZE,
        device=device,
    )
    return Sampler(config, MAX_NUM_REQS, VOCAB_SIZE, device, req_states)


@pytest.fixture
def num_sampled_with_noise(
    monkeypatch: pytest.MonkeyPatch, sampler: Sampler
) -> list[int]:
    """Sizes of the batches for which Sampler.sample() is called; it returns zeros."""
    sizes: list[int] = []

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any):
        sizes.append(len(logits))
        return torch.zeros(len(logits), dtype=torch.int64), logits

    monkeypatch.setattr(sampler, "sample", sample)
    return sizes


def make_batch(req_indices: list[int]) -> Any:
    """A decode batch, as far as the sampler reads it."""
    n = len(req_indices)
    return SimpleNamespace(
        num_reqs=n,
        idx_mapping=torch.tensor(req_indices),
        idx_mapping_np=np.array(req_indices),
        expanded_idx_mapping=torch.tensor(req_indices),
        expanded_local_pos=torch.zeros(n, dtype=torch.int32),
        logits_indices=torch.arange(n),
        positions=torch.arange(n),
        input_ids=torch.arange(n),
        cu_num_logits=torch.arange(n + 1),
        cu_num_logits_np=np.arange(n + 1),
        seq_lens=torch.ones(n, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(n, dtype=torch.int32),
    )


def make_logits(num_rows: int) -> torch.Tensor:
    """Rows whose maximum is in two places, and the first one of each row."""
    logits = torch.randn(num_rows, VOCAB_SIZE).clamp_(max=5)
    for row in range(num_rows):
        logits[row, [10 + row, 1500 + row]] = 9.0
    return logits


def test_greedy_batch_takes_first_maximum(sampler, num_sampled_with_noise):
    for req_idx in range(3):
        sampler.add_request(req_idx, GREEDY)
    output = sampler(make_logits(3), make_batch([2, 0, 1]))
    assert output.sampled_token_ids.dtype == torch.int64
    assert output.sampled_token_ids.tolist() == [[10], [11], [12]]
    assert not num_sampled_with_noise


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, logit_bias={3: 5.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
    ],
)
def test_one_other_request_samples_the_batch(sampler, num_sampled_with_noise, params):
    sampler.add_request(0, GREEDY)
    sampler.add_request(1, params)
    sampler(make_logits(2), make_batch([0, 1]))
    assert num_sampled_with_noise == [2]
    sampler(make_logits(1), make_batch([0]))
    assert num_sampled_with_noise == [2]


def test_dummy_batch_is_sampled(sampler, num_sampled_with_noise):
    """Warm-up compiles the sampling kernel."""
    sampler(make_logits(2), make_batch([0, 1]))
    assert num_sampled_with_noise == [2]


@pytest.mark.skipif(not current_platform.is_cuda_alike(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_returns_the_same_tokens(dtype):
    logits = make_logits(4).to("cuda", dtype)
    zeros = torch.zeros(4, dtype=torch.int64, device="cuda")
    sampled = gumbel_sample(
        logits,
        torch.arange(4, device="cuda"),
        torch.zeros(4, device="cuda"),
        zeros,
        zeros,
        apply_temperature=False,
        is_drafting=False,
    )
    assert torch.equal(sampled, logits.argmax(dim=-1))
