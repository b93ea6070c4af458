# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""quack's NVFP4 GEMM for SM90, the GEMV's partner; importing this needs quack.

It decodes weights exactly in registers and feeds them to WGMMA. ``gemm_w4a16`` of
quack.gemm_w4 is the same kernel, but it gives no FP32 output and keeps split-K buffers
by shape, which layers on two streams must not share. Here a weight has flags of its own
and a launch its own partial sums, from the caching allocator.

Each (N, K, output type, tiles) is compiled once, for any M, and kept in quack's cache
on disk. quack finds its plan of a launch by a key of all tensors' metadata, M included,
and makes eight views of a weight; both cost more than the launch. So the plan is kept
here, for any M, with the layout of the views.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
from quack.epilogue.frontend import gemm_epilogue
from quack.gemm_runtime.host import run_gemm_epi_plan
from quack.operand_transform.formats import decode_format
from quack.operand_transform.host import pick_w4_cfg, w4_operand_views
from quack.operand_transform.transform import TransformAOperand

from .gemv.config import FRAGMENT_BLOCK
from .gemv.tables import GemmTiles

# From so many tokens on quack's own choice of tiles no longer changes.
_LAST_CHANGE = 1024
_FORMAT = decode_format("nvfp4")
# Launches of more tokens do not split K, or zero flags of their own.
_FLAG_TOKENS = 1024
_SMALLEST_TILE_N = 16

# Shape and strides of a view.
_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class _Plan(NamedTuple):
    """quack's plan of a launch, and how it sees the codes and scales of a weight."""

    compiled: Any
    codes: _View
    scales: _View


_plans: dict[tuple, _Plan] = {}
# One for each output tile, by the weight's address and rows.
_flags: dict[tuple[int, int], torch.Tensor] = {}


@gemm_epilogue()
def _scaled(acc, alpha):
    """The global scale multiplies the FP32 sum, before the only rounding."""
    return {"D": acc * alpha}


def quack_tiles(n: int, k: int, m: int) -> GemmTiles:
    """The tiles that quack itself takes for ``m`` tokens."""
    return GemmTiles(*pick_w4_cfg(m, n, k // FRAGMENT_BLOCK))


def all_quack_tiles(n: int, k: int, first: int) -> list[GemmTiles]:
    """Every choice of ``quack_tiles`` from ``first`` tokens on."""
    tokens = range(first, max(first, _LAST_CHANGE) + 1)
    return list(dict.fromkeys(quack_tiles(n, k, m) for m in tokens))


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    out_dtype: torch.dtype,
    pdl: bool,
    tiles: GemmTiles,
    launch: bool = True,
) -> torch.Tensor:
    """``(x @ dequantized(weight).T) * global_scale``.

    Launches on one weight must not run at the same time.

    Args:
        x: BF16 [M, K], M at least 1.
        weight: uint8 [N / 64, K / 64, 128, 16] on the device of ``x``.
        weight_scale: uint8 [N / 64, K / 64, 32, 4, 2].
        global_scale: one FP32 value on the device, which a launch reads there, so that
            neither CUDA graphs nor compiled ones hold it.
        out_dtype: torch.bfloat16 or torch.float32.
        pdl: start while the previous kernel drains.
        tiles: of the GEMM.
        launch: False to compile only.

    Returns:
        [M, N], rounded once; not written where ``launch`` is False.

    """
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    out = x.new_empty(x.shape[0], FRAGMENT_BLOCK * weight.shape[0], dtype=out_dtype)
    key = (
        x.shape[1],
        x.dtype,
        x.device,
        weight.shape,
        weight.stride(),
        weight_scale.shape,
        weight_scale.stride(),
        out_dtype,
        pdl,
        tiles,
    )
    plan = _plans.get(key)
    if plan is None:
        compiled = _compile(x, weight, weight_scale, out, global_scale, pdl, tiles)
        views = w4_operand_views(_FORMAT, weight, weight_scale, tiles.tile_m)
        plan = _Plan(compiled, *((view.shape, view.stride()) for view in views))
        _plans[key] = plan
    if launch:
        codes, scales = plan.codes, plan.scales
        operand = TransformAOperand(
            weight.as_strided(*codes), weight_scale.as_strided(*scales)
        )
        buffers = None if tiles.split_k == 1 else _split_k_buffers(weight, out, tiles)
        run_gemm_epi_plan(
            plan.compiled,
            operand,
            x,
            out,
            None,
            {"alpha": global_scale},
            split_k_buffers=buffers,
        )
    return out


def _split_k_buffers(
    weight: torch.Tensor, out: torch.Tensor, tiles: GemmTiles
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Flags and partial sums of a launch, None where quack is to make them.

    quack zeroes new flags for each launch, a node more in a CUDA graph, though the
    kernel leaves them zero. Flags that outlive a launch must come neither from a graph
    that is being captured nor from the memory that sleep mode discards, so they are
    made at the weight's first launch outside of a graph.
    """
    m, n = out.shape
    if m > _FLAG_TOKENS:
        return None
    key = weight.data_ptr(), n
    flags = _flags.get(key)
    if flags is None:
        if torch.cuda.is_current_stream_capturing():
            return None
        most = n // FRAGMENT_BLOCK * (_FLAG_TOKENS // _SMALLEST_TILE_N)
        flags = torch.zeros(most, dtype=torch.int32, device=out.device)
        _flags[key] = flags
    grid = 1, -(-n // tiles.tile_m), -(-m // tiles.tile_n)
    sums = out.new_empty((*grid, tiles.tile_m * tiles.tile_n), dtype=torch.float32)
    return flags[: grid[1] * grid[2]].view(grid), sums


def _compile(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    global_scale: torch.Tensor,
    pdl: bool,
    tiles: GemmTiles,
    launch: bool = False,
) -> Any:
    """Have quack compile its kernel, for any M, and launch it where asked to."""
    return _scaled.gemm(
        x,
        weight,
        out,
        epi_args={"alpha": global_scale},
        transform_a="nvfp4",
        transform_sf=weight_scale,
        tile_M=tiles.tile_m,
        tile_N=tiles.tile_n,
        tile_K=FRAGMENT_BLOCK,
        cluster_M=1,
        cluster_N=1,
        split_k=tiles.split_k,
        post_init_attrs=() if pdl else (("use_pdl", False),),
        _launch=launch,
    )
