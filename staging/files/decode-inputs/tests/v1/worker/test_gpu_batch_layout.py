# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inputs that a batch's requests decide are made again with another batch only."""

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner

MAX_NUM_REQS = 4
MAX_NUM_TOKENS = 32
CPU = torch.device("cpu")

# req_state_idx -> (num_scheduled_tokens, num_draft_tokens), in batch order
Requests = dict[int, tuple[int, int]]
DECODE: Requests = {3: (1, 0), 0: (1, 0)}


def prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed, pos, seq_lens):
    seq_lens.zero_()
    for i, req_idx in enumerate(idx_mapping.tolist()):
        start, end = query_start_loc[i : i + 2].tolist()
        pos[start:end] = num_computed[req_idx] + torch.arange(end - start)
        seq_lens[i] = num_computed[req_idx] + end - start


def combine_sampled_and_draft_tokens(
    input_ids, idx_mapping, last_sampled, query_start_loc, *args
):
    cu_num_logits = args[3]
    logits_indices: list[int] = []
    for i, num_logits in enumerate(cu_num_logits.diff().tolist()):
        end = int(query_start_loc[i + 1])
        input_ids[end - num_logits : end] = last_sampled[idx_mapping[i]]
        logits_indices.extend(range(end - num_logits, end))
    return torch.tensor(logits_indices)


def prepare_prefill_inputs(
    input_ids, next_prefill_tokens, idx_mapping, query_start_loc, *args
):
    for i, req_idx in enumerate(idx_mapping.tolist()):
        input_ids[query_start_loc[i] : query_start_loc[i + 1]] = req_idx


def expand_idx_mapping(idx_mapping, total_num_logits, cu_num_logits, max_expand_len):
    num_logits = cu_num_logits.diff()
    local_pos = torch.cat([torch.arange(n) for n in num_logits.tolist()])
    return idx_mapping.repeat_interleave(num_logits), local_pos.int()


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Host data in the order in which it was copied; kernels run on the CPU."""
    data: list[Any] = []
    async_tensor_h2d = model_runner.async_tensor_h2d

    def record(source, *args, **kwargs):
        data.append(source)
        return async_tensor_h2d(source, *args, **kwargs)

    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    monkeypatch.setattr(model_runner, "async_tensor_h2d", record)
    for kernel in (
        prepare_pos_seq_lens,
        combine_sampled_and_draft_tokens,
        prepare_prefill_inputs,
        expand_idx_mapping,
    ):
        monkeypatch.setattr(model_runner, kernel.__name__, kernel)
    return data


def make_runner(speculator: Any = None) -> GPUModelRunner:
    runner = object.__new__(GPUModelRunner)
    num_computed_tokens = torch.arange(MAX_NUM_REQS, dtype=torch.int32)
    zeros = SimpleNamespace(gpu=torch.zeros(MAX_NUM_REQS))
    vars(runner).update(
        device=CPU,
        max_num_reqs=MAX_NUM_REQS,
        decode_query_len=4,
        input_buffers=InputBuffers(MAX_NUM_REQS, MAX_NUM_TOKENS, CPU),
        speculator=speculator,
        adaptive_verification=None,
        fast_prefill=None,
        pcp_manager=None,
        model_config=SimpleNamespace(rswa_window=None),
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
        req_states=SimpleNamespace(
            num_computed_tokens_np=num_computed_tokens.numpy(),
            num_computed_tokens=SimpleNamespace(gpu=num_computed_tokens),
            prefill_len=zeros,
            all_token_ids=zeros,
            next_prefill_tokens=zeros.gpu,
            last_sampled_tokens=torch.arange(MAX_NUM_REQS) + 100,
            draft_tokens=zeros.gpu,
        ),
    )
    return runner


def prepare(
    runner: GPUModelRunner, requests: Requests, num_tokens_padded: int = 8
) -> InputBatch:
    tokens, drafts = np.array(list(requests.values()), dtype=np.int32).T.copy()
    is_prefilling = tokens - drafts > 1
    batch_req_state = BatchReqState(
        req_ids=[str(req_idx) for req_idx in requests],
        num_scheduled_tokens=tokens,
        num_tokens=int(tokens.sum()),
        num_draft_tokens_np=drafts if drafts.any() else None,
        idx_mapping_np=np.array(list(requests), dtype=np.intp),
        prefill_len_np=np.ones_like(tokens),
        num_computed_prefill_tokens_np=np.where(is_prefilling, 0, 1),
        is_prefilling_np=is_prefilling,
        max_seq_len_np=None,
        has_prefill=bool(is_prefilling.any()),
        prefill_runs_as_decode_np=None,
        decode_graph_eligible=True,
    )
    scheduler_output: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={
            str(req_idx): [0] * num_drafts
            for req_idx, (_, num_drafts) in requests.items()
            if num_drafts
        },
        has_structured_output_requests=False,
    )
    batch_desc = BatchExecutionDescriptor(
        CUDAGraphMode.FULL, num_tokens_padded, MAX_NUM_REQS
    )
    return runner.prepare_inputs(scheduler_output, batch_req_state, batch_desc, 0)


def assert_as_with_new_buffers(
    batch: InputBatch, requests: Requests, num_tokens_padded: int = 8
) -> None:
    expected = prepare(make_runner(), requests, num_tokens_padded)
    for field in fields(InputBatch):
        value = getattr(batch, field.name)
        other = getattr(expected, field.name)
        if field.name in ("input_ids", "positions"):
            # The padding holds tokens of earlier batches.
            value, other = value[: batch.num_tokens], other[: batch.num_tokens]
        if isinstance(other, (torch.Tensor, np.ndarray)):
            assert value.dtype == other.dtype, field.name
            value, other = value.tolist(), other.tolist()
        assert value == other, field.name


def test_nothing_is_made_again_for_the_same_requests(copied):
    runner = make_runner()
    first = prepare(runner, DECODE)
    assert len(copied) == 2
    copied.clear()
    buffers = runner.input_buffers
    versions = buffers.is_padding._version, buffers.query_start_loc._version
    second = prepare(runner, DECODE)
    assert not copied
    assert versions == (buffers.is_padding._version, buffers.query_start_loc._version)
    assert second.idx_mapping is first.idx_mapping
    assert second.cu_num_logits is first.cu_num_logits
    assert second.expanded_local_pos is first.expanded_local_pos
    assert_as_with_new_buffers(second, DECODE)


@pytest.mark.parametrize("num_tokens", [2, 8])
def test_dummy_batch_takes_the_layout_away(num_tokens):
    runner = make_runner()
    prepare(runner, DECODE)
    assert runner.input_buffers.layout is not None
    InputBatch.make_dummy(2, num_tokens, runner.input_buffers)
    assert runner.input_buffers.layout is None
    assert_as_with_new_buffers(prepare(runner, DECODE), DECODE)


def test_no_layout_with_draft_tokens():
    runner = make_runner()
    # Nothing but the draft tokens differs.
    prepare(runner, {3: (3, 0), 0: (1, 0)})
    assert runner.input_buffers.layout is not None
    for _ in range(2):
        prepare(runner, {3: (3, 2), 0: (1, 0)})
        assert runner.input_buffers.layout is None


def test_no_layout_with_a_speculator(copied):
    runner = make_runner(speculator=object())
    for _ in range(2):
        copied.clear()
        prepare(runner, DECODE)
        assert len(copied) == 2
        assert runner.input_buffers.layout is None


@pytest.mark.parametrize("seed", range(8))
def test_any_batches_give_what_new_buffers_give(seed):
    rng = random.Random(seed)
    runner = make_runner()
    requests, num_tokens_padded = DECODE, 8
    for _ in range(60):
        change = rng.choice(["none", "none", "requests", "counts", "padding", "dummy"])
        if change == "requests":
            chosen = rng.sample(range(MAX_NUM_REQS), rng.randint(1, MAX_NUM_REQS))
            requests = {req_idx: (1, 0) for req_idx in chosen}
        elif change == "counts":
            for req_idx in requests:
                num_tokens = rng.randint(1, 4)
                num_drafts = rng.choice([0, num_tokens - 1])
                requests = requests | {req_idx: (num_tokens, num_drafts)}
        elif change == "padding":
            num_tokens_padded = rng.choice([0, 8, 16])
        elif change == "dummy":
            num_reqs = rng.randint(1, MAX_NUM_REQS)
            num_tokens = num_reqs * rng.randint(1, 3)
            InputBatch.make_dummy(num_reqs, num_tokens, runner.input_buffers)
            continue
        batch = prepare(runner, requests, num_tokens_padded)
        assert_as_with_new_buffers(batch, requests, num_tokens_padded)
