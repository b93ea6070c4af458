# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Batches of greedy requests take the argmax, and say what vLLM's kernel says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from support.interpreted import load_interpreted
from support.sampler import SLOTS, make_sampler, use_host_memory

VOCAB = 2500
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1)
# What changes a greedy request's logits.
PROCESSED = {
    "bias": SamplingParams(temperature=0, logit_bias={3: 5.0}),
    "penalty": SamplingParams(temperature=0, repetition_penalty=1.5),
    "minimum": SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3]),
    "budget": SamplingParams(temperature=0, thinking_token_budget=4),
}


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """vLLM's own; host memory stands for pinned memory, and no kernel counts tokens."""
    use_host_memory(monkeypatch)
    monkeypatch.setattr(
        sampler_module,
        "get_num_sampled_and_rejected",
        lambda ones, *others: (ones, torch.zeros_like(ones)),
    )
    return make_sampler(VOCAB)


def batch(slots: list[int]) -> Any:
    """A decode step's, one token a request; only what the sampler reads."""
    count = len(slots)
    each = torch.arange(count)
    return SimpleNamespace(
        num_reqs=count,
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        expanded_idx_mapping=torch.tensor(slots),
        expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        logits_indices=each,
        positions=each + 20,
        input_ids=each + 30,
        cu_num_logits=torch.arange(count + 1),
        cu_num_logits_np=np.arange(count + 1),
        seq_lens=each.int() + 21,
        seq_lens_cpu_upper_bound=each.int() + 21,
    )


def tied_logits(count: int) -> torch.Tensor:
    """Rows with maxima in several places, of one kernel block and of others."""
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0))
    for row, places in enumerate([(7,), (2100, 2400), (1500, 1501, 30), (1023, 1024)]):
        logits[row % count, list(places)] = 9.0 + row
    return logits


def sampled_apart(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> list[list]:
    """What `Sampler.sample` is called with from now on; it answers with zeros."""
    calls: list[list] = []

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append([*args, kwargs])
        return torch.zeros(len(logits), dtype=torch.int64), logits

    monkeypatch.setattr(sampler, "sample", sample)
    return calls


def tokens(output: SamplerOutput) -> list[int]:
    assert output.sampled_token_ids.dtype == torch.int64
    return output.sampled_token_ids[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_batches_say_what_the_kernel_says(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    gumbel = load_interpreted(monkeypatch, "vllm.v1.worker.gpu.sample.gumbel")
    for slot in range(SLOTS):
        sampler.add_request(slot, GREEDY)
    sampler.apply_staged_writes()
    logits = tied_logits(SLOTS).to(dtype)
    step = batch([2, 0, 3, 1])
    theirs = gumbel.gumbel_sample(
        logits,
        step.expanded_idx_mapping,
        sampler.sampling_states.temperature.gpu,
        sampler.sampling_states.seeds.gpu,
        step.positions,
        apply_temperature=False,
        is_drafting=False,
    )
    calls = sampled_apart(monkeypatch, sampler)
    assert tokens(sampler(logits, step)) == theirs.tolist() == [7, 2100, 30, 1023]
    assert not calls


def test_logprobs_are_of_the_logits(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []

    def scores(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(logits)

    monkeypatch.setattr(sampler_module, "compute_topk_scores", scores)
    calls = sampled_apart(monkeypatch, sampler)
    sampler.add_request(0, SamplingParams(temperature=0, logprobs=1))
    logits = tied_logits(1)
    for mode in ("raw_logprobs", "processed_logprobs"):
        sampler.logprobs_mode = mode
        sampler(logits, batch([0]))
    assert not calls and [x is logits for x in found] == [True, True]


@pytest.mark.parametrize(
    "other", [RANDOM, *PROCESSED.values()], ids=["random", *PROCESSED]
)
def test_one_other_request_is_enough(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, other: SamplingParams
) -> None:
    """A batch with it is sampled as a whole; without it, and after it, greedily."""
    calls = sampled_apart(monkeypatch, sampler)
    sampler.add_request(0, GREEDY)
    sampler.add_request(1, other)
    step = batch([1, 0])
    assert tokens(sampler(tied_logits(2), step)) == [0, 0]
    (call,) = calls
    assert call[3].tolist() == [20, 21] and call[4].tolist() == [30, 31]
    assert tokens(sampler(tied_logits(1), batch([0]))) == [1023]
    sampler.add_request(1, GREEDY)
    assert 0 not in tokens(sampler(tied_logits(2), step))
    assert len(calls) == 1


def test_dummy_batches_compile_the_kernel(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that no request ever had have temperature 0, and are sampled."""
    calls = sampled_apart(monkeypatch, sampler)
    sampler(tied_logits(2), batch([0, 1]))
    assert len(calls) == 1
