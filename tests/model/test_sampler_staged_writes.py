# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""vLLM's sampler copies its states after a request was added, and only then.

The sampler, its states and the turn of their buffers are vLLM's own. Only the memory
is not: without a GPU there is no pinned memory that one could read in place.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from support.sampler import SLOTS, make_sampler, use_host_memory

VOCAB = 128


class Custom(LogitsProcessor):
    """Counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def apply_staged_writes(self) -> None:
        self.calls += 1

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise AssertionError("nothing is sampled here")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[UvaBackedTensor]:
    """What was copied, in order; host memory stands for pinned memory."""
    done: list[UvaBackedTensor] = []
    copy = UvaBackedTensor.copy_to_uva

    def noted(self: UvaBackedTensor, n: int | None = None) -> torch.Tensor:
        done.append(self)
        return copy(self, n)

    use_host_memory(monkeypatch)
    monkeypatch.setattr(UvaBackedTensor, "copy_to_uva", noted)
    return done


def tensors(sampler: Sampler) -> Iterator[UvaBackedTensor]:
    """Every state that is copied as a whole, wherever the sampler has it."""
    for state in (*vars(sampler).values(), *sampler.logits_processors):
        if state is not sampler.req_states and hasattr(state, "apply_staged_writes"):
            for value in vars(state).values():
                if isinstance(value, UvaBackedTensor):
                    yield value


def params(value: int) -> SamplingParams:
    """Parameters that are this request's own, and need no kernel to be staged."""
    return SamplingParams(
        temperature=1 + value / 8, top_k=1 + value, top_p=1 / (2 + value), seed=value
    )


def test_nothing_is_copied_without_a_new_request(copied: list) -> None:
    sampler = make_sampler(VOCAB)
    sampler.add_request(0, params(0))
    sampler.apply_staged_writes()
    copied.clear()
    for _ in range(3):
        sampler.apply_staged_writes()
    assert copied == []


@pytest.mark.parametrize("trace", [False, True])
def test_each_request_is_copied_once(copied: list, trace: bool) -> None:
    sampler = make_sampler(VOCAB, trace=trace)
    states = {id(tensor) for tensor in tensors(sampler)}
    assert len(states) == 16 + trace
    for value in range(3):
        copied.clear()
        sampler.add_request(value, params(value))
        assert copied == []
        sampler.apply_staged_writes()
        # The thinking budget has a flag of its own, and here no request has one.
        budget = id(sampler.thinking_budget_state.thinking_token_budget)
        assert sorted(map(id, copied)) == sorted(states - {budget})
        for tensor in tensors(sampler):
            assert tensor.gpu.tolist() == tensor.cpu.tolist()
        sampler.apply_staged_writes()
        assert len(copied) == len(states) - 1


def test_custom_processors_are_called_at_every_step(copied: list) -> None:
    processors = Custom(), Custom()
    sampler = make_sampler(VOCAB, *processors)
    for step in range(1, 4):
        sampler.apply_staged_writes()
        assert [processor.calls for processor in processors] == [step, step]
    sampler.add_request(0, params(0))
    sampler.apply_staged_writes()
    assert [processor.calls for processor in processors] == [4, 4]


def test_copies_that_failed_are_made_up_for(
    copied: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make_sampler(VOCAB)
    sampler.add_request(0, params(0))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):

        def fail() -> None:
            raise RuntimeError

        patch.setattr(sampler.penalties_state, "apply_staged_writes", fail)
        sampler.apply_staged_writes()
    sampler.apply_staged_writes()
    assert sampler.penalties_state.repetition_penalty in copied


@pytest.mark.parametrize("in_flight", [2, 3])
def test_no_step_in_flight_loses_what_it_reads(
    copied: list, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    """Whichever steps bring a request: buffers are as many as steps in flight."""
    monkeypatch.setattr(buffer_utils, "_DEFAULT_MAX_CONCURRENCY", in_flight)
    for brings in itertools.product((False, True), repeat=7):
        sampler = make_sampler(VOCAB)
        reads: list[list[tuple[torch.Tensor, list]]] = []
        for step, new in enumerate(brings):
            if new:
                sampler.add_request(step % SLOTS, params(step))
            sampler.apply_staged_writes()
            views = [tensor.gpu for tensor in tensors(sampler)]
            reads.append([(view, view.tolist()) for view in views])
            for tensor, view in zip(tensors(sampler), views):
                assert view.tolist() == tensor.cpu.tolist()
            for view, before in itertools.chain(*reads[-in_flight:]):
                assert view.tolist() == before
