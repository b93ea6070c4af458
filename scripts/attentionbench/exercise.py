# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Launches what Flint's attention may launch, for a tool that watches the launches.

Such a tool makes a kernel a hundred times slower, so inputs are as small as reaches
every variant and every branch.
"""

import itertools

import torch
from vllm.models.flint.ops import decode_attention, norm, qk_norm_rope, qkv_fused
from vllm.models.flint.ops.attention.config import pick_config

from attentionbench.peers import SCALE
from attentionbench.problems import HEAD_DIM, HEADS, KV_HEADS, PAGE, Case, Inputs
from gemvbench.exercise import Part, as_layers_hold
from gemvbench.shapes import HIDDEN
from gemvbench.weights import Weight

_LONG = 4000
# Of the first requests: nothing, less than a tile, one key past a window's pages.
_LENGTHS = (_LONG, 0, 1, 513)
_MOST_BATCH = 256
_EPS = 1e-6
_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def batches(windowed: bool, sms: int) -> list[int]:
    """For every schedule a small batch that gets it, of all lengths if it can be."""
    found: dict[object, int] = {}
    enough = [*range(len(_LENGTHS), _MOST_BATCH + 1), *range(1, len(_LENGTHS))]
    for batch in enough:
        found.setdefault(pick_config(batch, KV_HEADS, sms, windowed), batch)
    return list(found.values())


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def _decode(device: str, counts: list[int]) -> None:
    """Counts are of requests that are short, beside those that reach a schedule."""
    sms = decode_attention.current_gpu().sms
    base = Inputs.random(Case(1, _LONG, sliding=False), device)
    unit = torch.ones(1, device=device)
    caches = {False: base.kv_cache, True: _fp8(base.kv_cache)}
    for window in (None, 513):
        for batch in dict.fromkeys([*batches(window is not None, sms), *counts]):
            lengths = [*_LENGTHS, *itertools.repeat(17, batch)][:batch]
            q = torch.randn(batch, HEADS, HEAD_DIM, device=device).bfloat16()
            pages = base.block_tables.repeat(batch, 1)
            seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
            for fp8, early_reads in itertools.product((False, True), repeat=2):
                decode_attention.flint_decode_attention(
                    q,
                    caches[fp8],
                    pages,
                    seq_lens,
                    base.sinks,
                    window,
                    SCALE,
                    torch.empty_like(q),
                    *((unit, unit) if fp8 else ()),
                    early_reads=early_reads,
                )


class _Cache:
    """A cache for some tokens, and what a layer knows of each.

    Attributes:
        layers: keys, values, and the rest that kernels take, of layers of every kind.
        rope: FP32 [positions, 128].
        positions: int64 [M].
        slots: int64 [M]; the last token of several is not cached.
    """

    def __init__(self, m: int, device: str) -> None:
        pages = -(-m // PAGE)
        shape = (pages, PAGE, KV_HEADS, 2 * HEAD_DIM)
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        unit = torch.ones(1, device=device)
        self.caches = [
            (*cache.split(HEAD_DIM, dim=-1), {}),
            (*_fp8(cache).split(HEAD_DIM, dim=-1), dict(k_scale=unit, v_scale=unit)),
        ]
        self.positions = torch.arange(m, device=device)
        self.slots = self.positions.clone()
        if m > 1:
            self.slots[-1] = -1
        self.rope = torch.rand(m, HEAD_DIM, device=device)


def _qkv(device: str, counts: list[int]) -> None:
    weights = as_layers_hold(Weight.random(_ROWS, HIDDEN, device))
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    head = gain[:HEAD_DIM].contiguous()
    for m, weight in itertools.product(counts, weights):
        x, stream = torch.randn(2, m, HIDDEN, device=device).bfloat16()
        known = _Cache(m, device)
        kinds = zip(known.caches, (known.rope, None), (stream, None))
        for (keys, values, scales), rope, residual in kinds:
            qkv_fused.qkv_of_layer(
                x,
                residual,
                gain,
                _EPS,
                weight,
                head,
                head,
                _EPS,
                rope,
                known.positions,
                keys,
                values,
                known.slots,
                HEADS,
                KV_HEADS,
                launch_dependents=True,
                **scales,
            )


def _qk_norm_rope(device: str, counts: list[int]) -> None:
    head = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device=device)
    for m in counts:
        qkv = torch.randn(m, _ROWS, device=device).bfloat16()
        known = _Cache(m, device)
        sizes = HEADS, KV_HEADS, HEAD_DIM
        for (keys, values, scales), rope in itertools.product(
            [*known.caches, (None, None, {})], (known.rope, None)
        ):
            qk_norm_rope.qk_norm_rope_cache(
                qkv,
                known.positions,
                head,
                head,
                _EPS,
                rope,
                keys,
                values,
                known.slots,
                *sizes,
                **scales,
            )


def _norms(device: str, counts: list[int]) -> None:
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for m in counts:
        x, stream = torch.randn(2, m, HIDDEN, device=device).bfloat16()
        norm.rms_norm(x, gain, _EPS)
        norm.add_rms_norm(x, stream, gain, _EPS)
        norm.fused_add_rms_norm(x, stream, gain, _EPS)
        norm.silu_and_mul(x)


PARTS = {
    "decode": Part(_decode, (1,), _MOST_BATCH),
    "qkv": Part(_qkv, (1, 8, 13, 16), qkv_fused.MAX_M),
    "qk_norm_rope": Part(_qk_norm_rope, (1, 70)),
    "norms": Part(_norms, (1, 17)),
}
