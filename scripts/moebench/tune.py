# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times schedules of the expert kernels, whatever the dispatch would pick."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from vllm.models.flint.ops import moe, moe_gemv
from vllm.models.flint.ops.experts.grouped import grouped_experts
from vllm.models.flint.ops.experts.grouped_config import (
    GroupedConfig,
    candidate_configs,
    pick_config,
)
from vllm.models.flint.ops.fragments import missing_quack
from vllm.models.flint.ops.gemv.config import Layout

from enginebench.models import FLINT
from gemvbench.table import Rows
from gemvbench.timing import graph_us
from gemvbench.tune import Results
from gemvbench.weights import weight_bytes
from moebench import sets
from moebench.ours import Ours
from moebench.weights import BlockWeights, Sizes, Tokens, chosen, met

GATE_UP, DOWN, GROUPED = "gate_up", "down_combine", "grouped"


@contextmanager
def scheduled(name: str, config: Any) -> Iterator[None]:
    """Makes `moe_gemv` launch its kernel `name` (gate_up, down) in this schedule."""
    attribute = f"{name}_variant"
    compiled = getattr(moe_gemv, attribute)

    with mock.patch.object(moe_gemv, attribute, lambda spec, _: compiled(spec, config)):
        yield


class _Pairs:
    """The operands of both kernels on one copy of the weights."""

    def __init__(self, weights: BlockWeights, m: int, packed: bool) -> None:
        sizes = weights.sizes
        self.layer = Ours(weights, packed).layer
        tokens = Tokens.random(m, sizes.hidden)
        self.x = tokens.normed(weights)
        self.ids = chosen(self.x, weights).int().contiguous()
        self.shares = torch.full(self.ids.shape, 1 / sizes.top_k, device="cuda")
        pairs = m * sizes.top_k
        self.act = torch.randn(pairs, sizes.width, device="cuda").bfloat16()
        self.sact = torch.randn(m, sizes.shared, device="cuda").bfloat16()
        self.out = torch.empty_like(self.x)

    def gate_up(self) -> None:
        experts = self.layer.experts
        first = experts.w1, experts.w1_scale, experts.alpha1
        shared = self.layer.shared_gate_up, None, None
        act, sact = torch.empty_like(self.act), torch.empty_like(self.sact)
        moe_gemv.gate_up(self.x, self.ids, *first, act, *shared, sact)

    def down_combine(self) -> None:
        experts = self.layer.experts
        second = experts.w2, experts.w2_scale, experts.alpha2
        shared = self.layer.shared_down, None, None
        rest = *second, self.sact, *shared, self.out
        moe_gemv.down_combine(self.act, self.ids, self.shares, *rest)

    def grouped(self, config: GroupedConfig) -> None:
        experts = self.layer.experts
        grouped_experts(self.x, self.ids, self.shares, experts, None, config)


def _time(
    results: Results, size: float, calls: list[Callable[[], object]], **row: Any
) -> None:
    try:
        results.add(round(size), graph_us(calls), **row)
    except Exception as error:
        # A schedule may ask for more registers or shared memory than there are.
        text = f"{type(error).__name__}: {error}"[:200]
        results.failures.append(row | {"error": text})


def time_decode(
    results: Results,
    kinds: list[str],
    tokens: list[int],
    copies: int,
    form: str,
    layout: Layout,
) -> None:
    """Adds rows for every schedule of the two kernels for few tokens.

    Args:
        results: Where rows go.
        kinds: Which kernels.
        tokens: Counts of tokens.
        copies: Weights in rotation.
        form: Decode form of the experts.
        layout: Of the shared expert's weight on this GPU.
    """
    sizes = Sizes.of(FLINT)
    weights = [BlockWeights.random(sizes) for _ in range(copies)]
    routed = weight_bytes(sizes.width, sizes.hidden, False)
    shared = weight_bytes(sizes.shared, sizes.hidden, False)
    second = sets.down_spec(sizes, form, layout)
    for m in tokens:
        first = next(
            spec
            for spec in sets.gate_up_specs(sizes, form, layout)
            if m <= spec.max_tokens
        )
        sweeps: dict[str, list[Any]] = {
            GATE_UP: list(sets.gate_up_sweep(first)),
            DOWN: list(sets.down_sweep(second)),
        }
        pairs = [_Pairs(w, m, form == "packed") for w in weights]
        experts = sum(met(p.ids) for p in pairs) / len(pairs)
        for kind in kinds:
            passes = 2 if kind == GATE_UP else 1
            size = passes * (experts * routed + shared)
            calls: list[Callable[[], object]] = [getattr(p, kind) for p in pairs]
            _time(results, size, calls, kind=kind, m=m, config="picked")
            for config in tqdm(sweeps[kind], desc=f"{kind} {m}"):
                if results.out_of_time(f"{kind} at {m} tokens"):
                    break
                with scheduled(kind.removesuffix("_combine"), config):
                    row = {"kind": kind, "m": m, "config": asdict(config)}
                    _time(results, size, calls, **row)
            results.save()


def time_grouped(
    results: Results,
    tokens: list[int],
    copies: int,
    blocks_t: list[int],
    packed: bool = False,
) -> None:
    """Adds rows for schedules of the grouped GEMM: one of its two GEMMs at a time.

    Args:
        results: Where rows go.
        tokens: Counts of tokens.
        copies: Weights in rotation.
        blocks_t: Rows of an expert in a tile; what is picked where there are none.
        packed: Whether the experts' codes are packed.
    """
    sizes = Sizes.of(FLINT)
    weights = [BlockWeights.random(sizes) for _ in range(copies)]
    for m in tokens:
        pairs = [_Pairs(w, m, packed) for w in weights]
        experts = sum(met(p.ids) for p in pairs) / len(pairs)
        size = 3 * experts * weight_bytes(sizes.width, sizes.hidden, False)
        picked = pick_config(m * sizes.top_k, sizes.experts)
        wanted = [picked]
        for block_t in blocks_t or [picked.block_t]:
            for gemm in candidate_configs(block_t):
                base = replace(picked, block_t=block_t)
                wanted += [replace(base, gate_up=gemm), replace(base, down=gemm)]
        for config in tqdm(list(dict.fromkeys(wanted)), desc=f"{GROUPED} {m}"):
            if results.out_of_time(f"{GROUPED} at {m} tokens"):
                break
            calls: list[Callable[[], object]] = [
                functools.partial(p.grouped, config) for p in pairs
            ]
            row = {"kind": GROUPED, "m": m, "config": asdict(config)}
            _time(results, size, calls, **row, is_picked=config == picked)
        # quack dequantizes what is not packed.
        quack = missing_quack() is None and not packed
        if quack and not results.out_of_time(f"quack at {m} tokens"):
            _time_quack(results, size, pairs, m)
        results.save()


def _time_quack(results: Results, size: float, pairs: list[_Pairs], m: int) -> None:
    """Adds rows for quack's BF16 GEMM, with and without the dequantization before."""
    from moebench.peers_quack import dense_experts, quack_grouped

    def calls(held: list[Any]) -> list[Callable[[], object]]:
        operands = [(p.x, p.ids, p.shares, p.layer.experts) for p in pairs]
        return [
            functools.partial(quack_grouped, *one, dense)
            for one, dense in zip(operands, held, strict=True)
        ]

    row = {"kind": GROUPED, "m": m}
    _time(results, size, calls([None] * len(pairs)), **row, config="dequantized, quack")
    held = [dense_experts(p.layer.experts) for p in pairs]
    _time(results, size, calls(held), **row, config="quack on BF16 weights")


def time_limits(
    results: Results, tokens: list[int], copies: int, packed: bool = False
) -> None:
    """Adds rows for the paths of a block around the limits between them."""
    sizes = Sizes.of(FLINT)
    weights = [BlockWeights.random(sizes) for _ in range(copies)]
    blocks = [Ours(w, packed) for w in weights]
    paths = {
        "three launches": {"LL_MOE_MAX_TOKENS": 1 << 30, "DECODE_MAX_TOKENS": 1 << 30},
        "two launches": {"LL_MOE_MAX_TOKENS": 0, "DECODE_MAX_TOKENS": 1 << 30},
        GROUPED: {"LL_MOE_MAX_TOKENS": 0, "DECODE_MAX_TOKENS": 0},
    }
    for m in tokens:
        inputs = [Tokens.random(m, sizes.hidden) for _ in weights]
        experts = sum(
            met(chosen(t.normed(w), w)) for t, w in zip(inputs, weights)
        ) / len(weights)
        calls: list[Callable[[], object]] = [
            functools.partial(b, t) for b, t in zip(blocks, inputs)
        ]
        for path, limits in paths.items():
            with _limits(limits):
                row = {"kind": "path", "m": m, "config": path}
                _time(results, sizes.n_bytes(experts), calls, **row)
        results.save()


@contextmanager
def _limits(limits: dict[str, int]) -> Iterator[None]:
    """Moves the limits, for the dispatch and for who asks it beforehand."""
    from vllm.models.flint.ops.experts import dispatch

    with (
        mock.patch.dict(vars(moe), limits),
        mock.patch.dict(vars(dispatch), limits),
    ):
        yield


def best_table(rows: Rows, most: int = 5) -> str:
    """For each kernel and count of tokens the picked and the fastest schedules."""
    lines = []
    for kind, m in dict.fromkeys((row["kind"], row["m"]) for row in rows):
        here = [row for row in rows if (row["kind"], row["m"]) == (kind, m)]
        lines.append(f"{kind} at {m} tokens")
        picked = [r for r in here if r["config"] == "picked" or r.get("is_picked")]
        best = sorted(here, key=lambda row: row["us"])[:most]
        for row in [*picked, *(row for row in best if row not in picked)]:
            mark = "*" if row in picked else " "
            lines.append(
                f" {mark}{row['us']:>9.2f} us {row['percent']:>4.0f}%  {row['config']}"
            )
    return "\n".join(lines)
