# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Inputs that a batch's requests decide are made again with another batch only.

`prepare_inputs`, its buffers and their dummy batches are vLLM's own. Only its kernels
are not: what they compute, computed here from the tensors that they are given.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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

SLOTS, TOKENS, CPU = 6, 48, torch.device("cpu")
KEPT = ("idx_mapping", "expanded_idx_mapping", "cu_num_logits", "expanded_local_pos")


@dataclass(frozen=True)
class Step:
    """A step's requests as (slot, new tokens, draft tokens), and what it is padded to.

    The draft tokens are among the new ones.
    """

    requests: tuple[tuple[int, int, int], ...]
    padded_tokens: int = 0
    padded_requests: int | None = None


@dataclass(frozen=True)
class Dummy:
    """A dummy batch in the runner's buffers."""

    requests: int
    tokens: int


def positions(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    computed: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    seq_lens.zero_()
    for i, slot in enumerate(idx_mapping.tolist()):
        start, end = query_start_loc[i : i + 2].tolist()
        first = int(computed[slot])
        pos[start:end] = torch.arange(first, first + end - start)
        seq_lens[i] = first + end - start


def sampled(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new: int,
) -> torch.Tensor:
    found = []
    for i, slot in enumerate(idx_mapping.tolist()):
        end = int(query_start_loc[i + 1])
        first = end - int(cu_num_logits[i + 1] - cu_num_logits[i])
        input_ids[first:end] = last_sampled[slot]
        found += range(first, end)
    assert len(found) == num_logits
    return torch.tensor(found)


def prefill(
    input_ids: torch.Tensor,
    next_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    *states: torch.Tensor,
) -> None:
    for i, slot in enumerate(idx_mapping.tolist()):
        input_ids[query_start_loc[i] : query_start_loc[i + 1]] = 10 * slot + 1


def expand(
    idx_mapping: torch.Tensor, num_logits: int, cu_num_logits: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = cu_num_logits.diff()
    local = torch.cat([torch.arange(n) for n in counts.tolist()]).int()
    return idx_mapping.repeat_interleave(counts, output_size=num_logits), local


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was copied to the device, in order."""
    done: list[Any] = []
    copy = model_runner.async_tensor_h2d

    def noted(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        done.append(data)
        return copy(data, *args, **kwargs)

    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    for name, own in {
        "async_tensor_h2d": noted,
        "prepare_prefill_inputs": prefill,
        "prepare_pos_seq_lens": positions,
        "combine_sampled_and_draft_tokens": sampled,
        "expand_idx_mapping": expand,
    }.items():
        monkeypatch.setattr(model_runner, name, own)
    return done


def make_runner(
    computed: np.ndarray | None = None, speculator: Any = None
) -> GPUModelRunner:
    """A runner with new buffers; the tokens computed so far may be another's."""
    computed = np.zeros(SLOTS, np.int32) if computed is None else computed

    def on_gpu(data: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(gpu=data)

    runner = object.__new__(GPUModelRunner)
    vars(runner).update(
        device=CPU,
        max_num_reqs=SLOTS,
        decode_query_len=4,
        input_buffers=InputBuffers(SLOTS, TOKENS, CPU),
        speculator=speculator,
        adaptive_verification=None,
        fast_prefill=None,
        pcp_manager=None,
        model_config=SimpleNamespace(rswa_window=None),
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
        req_states=SimpleNamespace(
            num_computed_tokens_np=computed,
            num_computed_tokens=on_gpu(torch.from_numpy(computed)),
            prefill_len=on_gpu(torch.full((SLOTS,), 8)),
            all_token_ids=on_gpu(torch.zeros(SLOTS, TOKENS)),
            next_prefill_tokens=torch.zeros(SLOTS),
            last_sampled_tokens=torch.arange(SLOTS) + 100,
            draft_tokens=torch.zeros(SLOTS, 3),
        ),
    )
    return runner


def prepare(runner: GPUModelRunner, step: Step) -> InputBatch:
    slots, counts, drafts = np.array(step.requests, dtype=np.int32).T
    req_ids = [f"request-{slot}" for slot in slots]
    prefilling = counts - drafts > 1
    planned: Any = SimpleNamespace(
        scheduled_spec_decode_tokens={
            req_id: [0] * n for req_id, n in zip(req_ids, drafts) if n
        },
        has_structured_output_requests=False,
    )
    state = BatchReqState(
        req_ids=req_ids,
        num_scheduled_tokens=counts.copy(),
        num_tokens=int(counts.sum()),
        num_draft_tokens_np=drafts.copy() if drafts.any() else None,
        idx_mapping_np=slots.astype(np.intp),
        prefill_len_np=np.full(len(slots), 8),
        num_computed_prefill_tokens_np=np.where(prefilling, 0, 8),
        is_prefilling_np=prefilling,
        max_seq_len_np=None,
        has_prefill=bool(prefilling.any()),
        prefill_runs_as_decode_np=None,
        decode_graph_eligible=True,
    )
    shape = BatchExecutionDescriptor(
        CUDAGraphMode.NONE, step.padded_tokens, step.padded_requests
    )
    return runner.prepare_inputs(planned, state, shape, 0)


def prepare_all(
    runner: GPUModelRunner, steps: Sequence[Step | Dummy]
) -> list[InputBatch]:
    """Prepare every step, and hold each to what new buffers give."""
    batches = []
    for step in steps:
        if isinstance(step, Dummy):
            InputBatch.make_dummy(step.requests, step.tokens, runner.input_buffers)
            continue
        fresh = make_runner(runner.req_states.num_computed_tokens_np)
        batch, due = prepare(runner, step), prepare(fresh, step)
        assert_same(batch, due)
        ours, theirs = runner.input_buffers, fresh.input_buffers
        assert torch.equal(ours.query_start_loc, theirs.query_start_loc)
        batches.append(batch)
        for slot, count, _ in step.requests:
            runner.req_states.num_computed_tokens_np[slot] += count
    return batches


def assert_same(batch: InputBatch, due: InputBatch) -> None:
    for field in fields(InputBatch):
        found, other = getattr(batch, field.name), getattr(due, field.name)
        if field.name in ("input_ids", "positions"):
            # Behind the batch's tokens lies what any batch before left there.
            found, other = found[: batch.num_tokens], other[: batch.num_tokens]
        if isinstance(other, torch.Tensor | np.ndarray):
            assert found.dtype == other.dtype, field.name
            found, other = found.tolist(), other.tolist()
        assert found == other, field.name


def decode(*slots: int, tokens: int = 0, requests: int | None = None) -> Step:
    return Step(tuple((slot, 1, 0) for slot in slots), tokens, requests)


def test_nothing_is_made_again_for_the_same_requests(copied: list) -> None:
    runner = make_runner()
    step = decode(3, 0, tokens=4, requests=4)
    first = prepare(runner, step)
    assert len(copied) == 2
    copied.clear()
    buffers = runner.input_buffers
    written = buffers.is_padding._version, buffers.query_start_loc._version
    for _ in range(3):
        runner.req_states.num_computed_tokens_np += 1
        second = prepare(runner, step)
        assert copied == []
        for name in KEPT:
            assert getattr(second, name) is getattr(first, name)
        assert (
            buffers.is_padding._version,
            buffers.query_start_loc._version,
        ) == written
        fresh = make_runner(runner.req_states.num_computed_tokens_np)
        assert_same(second, prepare(fresh, step))
        copied.clear()
    assert second.is_padding.tolist() == [False, False, True, True]
    assert second.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert second.query_start_loc_np.tolist() == [0, 1, 2, 2, 2]
    assert second.cu_num_logits_np.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        decode(3, 0, 1, tokens=4),
        decode(3, tokens=4),
        decode(3, 1, tokens=4),
        decode(0, 3, tokens=4),
        decode(3, 0, tokens=8),
        Step(((3, 1, 0), (0, 3, 0)), 4),
        Step(((3, 2, 1), (0, 1, 0)), 4),
        Dummy(2, 4),
        Dummy(2, 2),
    ],
    ids=repr,
)
def test_after_another_batch_all_is_made_again(
    copied: list, other: Step | Dummy
) -> None:
    runner = make_runner()
    same = decode(3, 0, tokens=4)
    first, *_, last = prepare_all(runner, [same, other, same])
    assert last.idx_mapping is not first.idx_mapping
    copied.clear()
    prepare(runner, same)
    assert copied == []


def test_a_batch_may_be_padded_to_other_requests(copied: list) -> None:
    """All of query_start_loc is written, so how much of it is used does not matter."""
    runner = make_runner()
    step = decode(1, 2, tokens=4)
    first, second = prepare_all(runner, [step, replace(step, padded_requests=4)])
    assert second.idx_mapping is first.idx_mapping
    assert second.query_start_loc.tolist() == [0, 1, 2, 2, 2]


def test_a_dummy_batch_takes_the_layout_away() -> None:
    runner = make_runner()
    prepare(runner, decode(0, 1))
    assert runner.input_buffers.layout is not None
    InputBatch.make_dummy(2, 2, runner.input_buffers)
    assert runner.input_buffers.layout is None


def test_no_layout_with_draft_tokens(copied: list) -> None:
    runner = make_runner()
    # The same counts, so that nothing but the draft tokens differs.
    chunk, drafts = Step(((0, 3, 0), (1, 1, 0))), Step(((0, 3, 2), (1, 1, 0)))
    for step in (chunk, drafts, drafts):
        copied.clear()
        prepare_all(runner, [step])
        assert (runner.input_buffers.layout is None) == (step is drafts)
    # Three of the runner's own, and three of the one that it is held to.
    assert len(copied) == 6


def test_no_layout_with_a_speculator(copied: list) -> None:
    runner = make_runner(speculator=object())
    for _ in range(3):
        copied.clear()
        prepare(runner, decode(0, 1))
        assert len(copied) == 2
        assert runner.input_buffers.layout is None


def random_steps(rng: random.Random, count: int) -> list[Step | Dummy]:
    """Steps that mostly differ in one thing from the one before, or in none."""
    slots, steps, paddings = [0, 1], list[Step | Dummy](), (0, None)
    for _ in range(count):
        match rng.choices(
            ("same", "join", "leave", "order", "chunk", "padding", "dummy", "drafts"),
            (6, 1, 1, 1, 1, 1, 2, 1),
        )[0]:
            case "join" if len(slots) < SLOTS:
                free = set(range(SLOTS)) - set(slots)
                slots.insert(rng.randint(0, len(slots)), rng.choice(sorted(free)))
            case "leave" if len(slots) > 1:
                slots.remove(rng.choice(slots))
            case "order":
                rng.shuffle(slots)
            case "padding":
                paddings = rng.choice([0, 8, 16, 24]), rng.choice([None, SLOTS])
            case "chunk":
                lucky = rng.choice(slots)
                counts = [(s, rng.randint(2, 6) if s == lucky else 1, 0) for s in slots]
                steps.append(Step(tuple(counts), *paddings))
                continue
            case "drafts":
                some = [(s, 1 + (n := rng.randint(0, 3)), n) for s in slots]
                steps.append(Step(tuple(some), *paddings))
                continue
            case "dummy":
                requests = rng.randint(1, SLOTS)
                steps.append(Dummy(requests, requests * rng.randint(1, 3)))
                continue
        steps.append(Step(tuple((s, 1, 0) for s in slots), *paddings))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_any_steps_give_what_new_buffers_give(seed: int) -> None:
    batches = prepare_all(make_runner(), random_steps(random.Random(seed), 60))
    pairs = list(zip(batches, batches[1:]))
    kept = sum(first.idx_mapping is second.idx_mapping for first, second in pairs)
    assert 5 < kept < len(pairs) - 5
