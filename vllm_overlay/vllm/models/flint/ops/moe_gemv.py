# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The experts of a few tokens, in two launches: ``gate_up``, then ``down_combine``.

``experts/gate_up.py`` and ``experts/down.py`` say what is computed, how exactly and how
fast. This module checks arguments, picks a schedule and launches. Nothing is allocated,
and all of it may be captured in a CUDA graph once compiled (``warmup_experts``).
"""

import functools
from typing import TYPE_CHECKING

import torch

from .experts.spec import (
    DOWN_CASES,
    MAX_TOKENS,
    TOKEN_CASES,
    DownConfig,
    DownSpec,
    GateUpConfig,
    GateUpSpec,
    down_config,
    gate_up_config,
)
from .experts.variants import down_variant, gate_up_variant
from .gemv.config import GemvSpec
from .gemv.tables import Shape
from .gemv_weight import COLUMNS, GemvWeight, swizzled_bytes
from .nvfp4_gemv import decode_form, with_aligned_rows

if TYPE_CHECKING:
    from .experts.weights import FlintMoEWeights

# Offsets into a tensor of all experts are 32-bit counts of 32-bit words.
_MAX_WORDS = 2**31


def gate_up(
    x: torch.Tensor,
    ids: torch.Tensor,
    w1: torch.Tensor,
    w1_sf: torch.Tensor | None,
    alpha: torch.Tensor | None,
    act: torch.Tensor,
    wsh: torch.Tensor | GemvWeight | None,
    ssh: torch.Tensor | None,
    gssh: torch.Tensor | None,
    sact: torch.Tensor | None,
    pdl: bool = True,
) -> None:
    """Gate and up projections with SiLU: the chosen experts' and the shared one's.

    Args:
        x: BF16 [M, H], unit inner stride, M at most ``MAX_TOKENS``.
        ids: int32 [M, top_k], each token's experts.
        w1: the experts' [gate | up]: uint8 [E, 2 * I, H / 2] in ModelOpt's layout,
            int32 [E, 2 * I, H / 8] in that of ``pack_codes``, or BF16 [E, 2 * I, H].
        w1_sf: uint8 [E, any]: for each expert the E4M3 bytes of [2 * I, H / 16] in the
            128x4 swizzle; None for BF16.
        alpha: the experts' global scales, FP32 [E]; None for BF16.
        act: where to write silu(gate) * up, BF16 [M * top_k, I].
        wsh: the shared expert's [gate | up] as a dense linear layer holds it: uint8
            [2 * Ish, H / 2], uint8 fragments with four dimensions, or BF16
            [2 * Ish, H]; or all of these as a ``GemvWeight``, which was checked
            once. None, as are the following, where there is none.
        ssh: its scales; None for BF16 and a ``GemvWeight``.
        gssh: its global scale, FP32 [1]; None likewise.
        sact: where to write the shared expert's silu(gate) * up, BF16 [M, Ish].
        pdl: start before the previous kernel in the stream ends.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    m, top_k = ids.shape
    weight = _expert_words(w1, "w1")
    shape = _expert_shape(w1, silu_mul=True)
    shared = _shared_weight(wsh, ssh, gssh)
    _check_rows(x, (m, shape.k), "x")
    _check_ids(ids)
    _check_output(act, (m * top_k, shape.n // 2), "act")
    _check_scales(w1, w1_sf, alpha)
    operands: tuple[torch.Tensor | None, ...] = (None, None, None)
    if shared is not None:
        operands = shared.operands
        _check_k(shared, shape.k)
        _check_output(sact, (m, shared.shape.n // 2), "sact")
    if m == 0:
        return
    if m > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens fit, got {m}")
    case = _case(TOKEN_CASES, m)
    shared_shape = None if shared is None else shared.shape
    packed = w1.dtype == torch.int32
    gate_up_variant(*_gate_up(shape, shared_shape, top_k, case, pdl, packed))(
        with_aligned_rows(x),
        ids.view(-1),
        weight,
        None if w1_sf is None else w1_sf.view(torch.int32),
        alpha,
        act,
        *operands,
        None if shared is None else sact,
    )


def down_combine(
    act: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    w2: torch.Tensor,
    w2_sf: torch.Tensor | None,
    alpha2: torch.Tensor | None,
    sact: torch.Tensor | None,
    wsd: torch.Tensor | GemvWeight | None,
    ssd: torch.Tensor | None,
    gssd: torch.Tensor | None,
    out: torch.Tensor,
    pdl: bool = True,
) -> None:
    """Down projections, their weighted sum, and the shared expert's.

    With ``pdl`` the kernel launched just before must not write ``ids``, ``tw`` or a
    weight: they are read while it may still run.

    Args:
        act: BF16 [M * top_k, I], as ``gate_up`` wrote it.
        ids: int32 [M, top_k], each token's experts.
        tw: their weights, FP32 [M, top_k].
        w2: the experts' down projections: uint8 [E, H, I / 2] in ModelOpt's layout,
            int32 [E, H, I / 8] in that of ``pack_codes``, or BF16 [E, H, I].
        w2_sf: uint8 [E, any]: for each expert the E4M3 bytes of [H, I / 16] in the
            128x4 swizzle; None for BF16.
        alpha2: the experts' global scales, FP32 [E]; None for BF16.
        sact: BF16 [M, Ish], as ``gate_up`` wrote it. None, as are the following, where
            there is no shared expert.
        wsd: the shared expert's down projection, in one of the forms of ``gate_up``.
        ssd: its scales; None for BF16 and a ``GemvWeight``.
        gssd: its global scale, FP32 [1]; None likewise.
        out: where to write the sum, BF16 [M, H].
        pdl: start before the previous kernel in the stream ends.

    Raises:
        ValueError: an argument has the wrong type, shape or layout.

    """
    m, top_k = ids.shape
    weight = _expert_words(w2, "w2")
    shape = _expert_shape(w2)
    shared = _shared_weight(wsd, ssd, gssd)
    _check_ids(ids)
    _check_output(act, (m * top_k, shape.k), "act")
    _check_output(out, (m, shape.n), "out")
    _check_scales(w2, w2_sf, alpha2)
    if tw.dtype != torch.float32 or tw.shape != ids.shape or not tw.is_contiguous():
        raise ValueError("tw must be contiguous FP32 of the shape of ids")
    operands: tuple[torch.Tensor | None, ...] = (None, None, None)
    if shared is not None:
        operands = shared.operands
        _check_output(sact, (m, shared.shape.k), "sact")
        if shared.shape.n != shape.n:
            raise ValueError(f"the shared expert must have {shape.n} outputs")
    if m == 0:
        return
    shared_shape = None if shared is None else shared.shape
    packed = w2.dtype == torch.int32
    case = _case(DOWN_CASES, m)
    down_variant(*_down(shape, shared_shape, top_k, case, pdl, packed))(
        act,
        ids.view(-1),
        tw.view(-1),
        weight,
        None if w2_sf is None else w2_sf.view(torch.int32),
        alpha2,
        None if shared is None else sact,
        *operands,
        out,
    )


def why_not(
    weights: "FlintMoEWeights",
    shared_gate_up: GemvWeight | None,
    shared_down: GemvWeight | None,
    top_k: int,
) -> str | None:
    """Why these kernels cannot serve such experts, or None."""
    for tensor in (weights.w1, weights.w2):
        words = tensor.numel() * tensor.element_size() // 4
        if words >= _MAX_WORDS:
            return f"{words} words of experts are more than {_MAX_WORDS - 1}"
    first, second = _variants(weights, shared_gate_up, shared_down, top_k, MAX_TOKENS)
    reasons = [config.why_not(spec) for spec, config in first]
    reasons += [config.why_not(spec) for spec, config in second]
    return next((reason for reason in reasons if reason is not None), None)


def warmup_experts(
    weights: "FlintMoEWeights",
    shared_gate_up: GemvWeight | None,
    shared_down: GemvWeight | None,
    top_k: int,
    max_tokens: int = MAX_TOKENS,
    pdl: bool = True,
) -> None:
    """Compiles what the two functions may launch for up to ``max_tokens`` tokens."""
    first, second = _variants(
        weights, shared_gate_up, shared_down, top_k, max_tokens, pdl
    )
    for gate_up_spec, gate_up_schedule in first:
        gate_up_variant(gate_up_spec, gate_up_schedule)
    for down_spec, down_schedule in second:
        down_variant(down_spec, down_schedule)


def _variants(
    weights: "FlintMoEWeights",
    shared_gate_up: GemvWeight | None,
    shared_down: GemvWeight | None,
    top_k: int,
    max_tokens: int,
    pdl: bool = True,
) -> tuple[list[tuple[GateUpSpec, GateUpConfig]], list[tuple[DownSpec, DownConfig]]]:
    """All variants of both kernels."""
    shared_first = None if shared_gate_up is None else shared_gate_up.shape
    shared_second = None if shared_down is None else shared_down.shape
    shape = _expert_shape(weights.w1, silu_mul=True)
    down_shape, packed = _expert_shape(weights.w2), weights.w1.dtype == torch.int32
    return (
        [
            _gate_up(shape, shared_first, top_k, case, pdl, packed)
            for case in TOKEN_CASES
            if case <= _case(TOKEN_CASES, max_tokens)
        ],
        [
            _down(down_shape, shared_second, top_k, case, pdl, packed)
            for case in DOWN_CASES
            if case <= _case(DOWN_CASES, max_tokens)
        ],
    )


def _case(cases: tuple[int, ...], tokens: int) -> int:
    return next((case for case in cases if tokens <= case), cases[-1])


@functools.cache
def _gate_up(
    shape: Shape, shared: Shape | None, top_k: int, case: int, pdl: bool, packed: bool
) -> tuple[GateUpSpec, GateUpConfig]:
    spec = GateUpSpec(
        top_k,
        shape.n // 2,
        _gemv_spec(shape, True, pdl, packed),
        None if shared is None else _gemv_spec(shared, True, pdl),
        0 if shared is None else shared.n // 2,
        case,
    )
    return spec, gate_up_config(spec)


@functools.cache
def _down(
    shape: Shape,
    shared: Shape | None,
    top_k: int,
    case: int,
    pdl: bool,
    packed: bool,
) -> tuple[DownSpec, DownConfig]:
    spec = DownSpec(
        top_k,
        shape.n,
        _gemv_spec(shape, False, pdl, packed),
        None if shared is None else _gemv_spec(shared, False, pdl),
    )
    return spec, down_config(spec, case)


def _gemv_spec(
    shape: Shape, silu_mul: bool, pdl: bool, packed: bool = False
) -> GemvSpec:
    form = "bf16" if shape.bf16 else "packed" if packed else decode_form()
    return GemvSpec(shape.k, form, silu_mul, pdl=pdl, layout=shape.layout)


def _expert_shape(weight: torch.Tensor, silu_mul: bool = False) -> Shape:
    """One expert's matrix."""
    _, rows, width = weight.shape
    k = width * COLUMNS[weight.dtype]
    return Shape(rows, k, silu_mul, weight.dtype == torch.bfloat16)


def _expert_words(weight: torch.Tensor, name: str) -> torch.Tensor:
    if weight.dtype not in COLUMNS or weight.dim() != 3:
        raise ValueError(f"{name} must be uint8, int32 or BF16 [experts, rows, width]")
    if not weight.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    return weight.view(torch.int32)


def _shared_weight(
    weight: torch.Tensor | GemvWeight | None,
    scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> GemvWeight | None:
    if weight is None or isinstance(weight, GemvWeight):
        return weight
    if scales is None or global_scale is None:
        return GemvWeight.bf16(weight)
    if weight.dim() == 2:
        return GemvWeight.row_major(weight, scales, global_scale)
    return GemvWeight.fragments(weight, scales, global_scale)


def _check_k(shared: GemvWeight, k: int) -> None:
    if shared.shape.k != k:
        raise ValueError(f"the shared expert must have {k} inputs")


def _check_ids(ids: torch.Tensor) -> None:
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("ids must be contiguous int32 [M, top_k]")


def _check_rows(x: torch.Tensor, shape: tuple[int, int], name: str) -> None:
    if x.dtype != torch.bfloat16 or tuple(x.shape) != shape:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"{name} must be BF16 {list(shape)}, got {got}")
    if x.stride(1) != 1 and x.numel():
        raise ValueError(f"{name} must have unit inner stride")


def _check_output(x: torch.Tensor | None, shape: tuple[int, int], name: str) -> None:
    if x is None:
        raise ValueError(f"{name} must be given for a shared expert")
    _check_rows(x, shape, name)
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _check_scales(
    weight: torch.Tensor, scales: torch.Tensor | None, alpha: torch.Tensor | None
) -> None:
    """Raises ValueError where these are no scales of all experts' weights."""
    experts, rows, width = weight.shape
    if weight.dtype == torch.bfloat16:
        if scales is not None or alpha is not None:
            raise ValueError("BF16 experts must have no scales")
        return
    expected = (experts, swizzled_bytes(rows, width * COLUMNS[weight.dtype]))
    if scales is None or scales.dtype != torch.uint8 or scales.shape != expected:
        raise ValueError(f"the experts' scales must be uint8 {list(expected)}")
    if not scales.is_contiguous():
        raise ValueError("the experts' scales must be contiguous")
    if alpha is None or alpha.dtype != torch.float32 or alpha.shape != (experts,):
        raise ValueError(f"the experts' global scales must be FP32 [{experts}]")
