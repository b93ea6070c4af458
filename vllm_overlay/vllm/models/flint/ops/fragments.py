# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 linears on SM90 from one copy of the weight, in quack's fragment order.

The GEMV and its partner, quack's GEMM, read the same bytes (``gemv/fragments.py`` says
how they lie). The copy that the checkpoint has is given up.
"""

import functools
import importlib.metadata
from types import ModuleType

import torch
import torch.nn.functional as F

from vllm.utils.torch_utils import direct_register_custom_op

from .gemv.config import FRAGMENT_BLOCK, SCALE_ROWS
from .gemv.tables import GemmTiles, Shape
from .gemv.variants import report_compilation
from .norm import silu_and_mul
from .nvfp4_gemv import fragment_gemv, gemm_tiles, max_tokens

# The release whose layout and numerics were read, tested and measured.
QUACK_RELEASE = "0.6.5"
# Rows that are put in order at a time, which bounds the memory this takes.
_ROWS = 128 * SCALE_ROWS


@functools.cache
def missing_quack() -> str | None:
    """Why quack's GEMM cannot be used, or None."""
    try:
        version = importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return f"quack-kernels {QUACK_RELEASE} is not installed"
    if version != QUACK_RELEASE:
        return f"quack-kernels {QUACK_RELEASE} is needed, found {version}"
    try:
        from . import quack_gemm  # noqa: F401
    except Exception as error:
        # A broken install raises anything while it loads its libraries.
        return f"quack-kernels cannot be imported: {error}"
    return None


@functools.cache
def _quack_gemm() -> ModuleType:
    """Load what needs quack; an import statement costs each call a microsecond."""
    from . import quack_gemm

    return quack_gemm


def to_fragments(
    weight: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts a ModelOpt weight in the order that quack's GEMM and the GEMV read.

    Zeros pad N to a multiple of 128 and K to one of 64. A negative scale gives its sign
    to its codes, and codes under a zero scale become zeros: every product stays.

    Args:
        weight: uint8 [N, K / 2], ModelOpt layout.
        weight_scale: E4M3 or uint8 [N, K / 16], not swizzled.

    Returns:
        uint8 [N / 64, K / 64, 128, 16] and [N / 64, K / 64, 32, 4, 2], in new memory.

    """
    from quack.gemm_w4 import prepare_w4_weight

    rows = -(-weight.shape[0] // SCALE_ROWS) * SCALE_ROWS
    blocks = -(-weight.shape[1] // (FRAGMENT_BLOCK // 2))
    codes = weight.new_empty((rows // FRAGMENT_BLOCK, blocks, 128, 16))
    scales = weight.new_empty((rows // FRAGMENT_BLOCK, blocks, 32, 4, 2))
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        own = _without_signs(weight[part], weight_scale[part].view(torch.uint8))
        out = slice(start // FRAGMENT_BLOCK, (start + _ROWS) // FRAGMENT_BLOCK)
        codes[out], scales[out] = prepare_w4_weight(*own, "nvfp4")
    return codes, scales


def _without_signs(
    codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = F.pad(codes, (0, -codes.shape[1] % (FRAGMENT_BLOCK // 2)))
    scales = F.pad(scales, (0, -scales.shape[1] % 4))
    sign = scales & 0x80
    flipped = sign | sign >> 4
    kept = torch.where(scales & 0x7F == 0, 0x88, 0xFF).to(torch.uint8)
    blocks = codes.unflatten(1, (-1, 8)) ^ flipped.unsqueeze(-1)
    blocks &= kept.unsqueeze(-1)
    return blocks.flatten(1), scales & 0x7F


def compile_partner(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool,
    out_dtype: torch.dtype,
    pdl: bool,
) -> None:
    """Compiles what ``fragment_linear`` may launch past the GEMV's limit.

    Arguments are those of ``fragment_linear``; nothing is launched.
    """
    quack_gemm = _quack_gemm()
    groups, blocks = weight.shape[:2]
    shape = _shape(groups, blocks, silu_mul)
    first = 1 + max_tokens(shape.n, shape.k, silu_mul, layout="fragments")
    choices = list(gemm_tiles(shape).values())
    if not choices:
        choices = quack_gemm.all_quack_tiles(shape.n, shape.k, first)
    x = torch.empty((1, shape.k), dtype=torch.bfloat16, device=weight.device)
    for tiles in choices:
        args = x, weight, weight_scale, global_scale, out_dtype, pdl, tiles
        quack_gemm.gemm(*args, launch=False)


def _shape(groups: int, blocks: int, silu_mul: bool) -> Shape:
    n, k = FRAGMENT_BLOCK * groups, FRAGMENT_BLOCK * blocks
    return Shape(n, k, silu_mul, layout="fragments")


def measured_tiles(shape: Shape, m: int) -> GemmTiles | None:
    """The partner's measured tiles for ``m`` tokens, None where there are none."""
    measured = gemm_tiles(shape)
    if not measured:
        return None
    return measured[min((t for t in measured if t >= m), default=max(measured))]


@functools.lru_cache(maxsize=4096)
def _tiles(groups: int, blocks: int, silu_mul: bool, m: int) -> GemmTiles:
    shape = _shape(groups, blocks, silu_mul)
    return measured_tiles(shape, m) or _quack_gemm().quack_tiles(shape.n, shape.k, m)


def fragment_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool,
    fp32_out: bool,
    pdl: bool,
    max_gemv_tokens: int,
) -> torch.Tensor:
    """``dense.nvfp4_linear`` on a weight in fragment order.

    Args:
        x: BF16 [M, K], unit inner stride.
        weight: uint8 [N / 64, K / 64, 128, 16]; see ``to_fragments``.
        weight_scale: uint8 [N / 64, K / 64, 32, 4, 2].
        global_scale: one FP32 value on the device.
        silu_mul: rows are [gate | up]; see ``nvfp4_gemv``.
        fp32_out: FP32 output, for logits.
        pdl: let weights load while the previous kernel drains.
        max_gemv_tokens: the GEMV serves up to so many tokens.

    Returns:
        [M, N], or [M, N/2] with ``silu_mul``.

    """
    report_compilation()
    dtype = torch.float32 if fp32_out else torch.bfloat16
    m = x.shape[0]
    if m <= max_gemv_tokens or m == 0:
        return fragment_gemv(
            x, weight, weight_scale, global_scale, silu_mul, pdl, out_dtype=dtype
        )
    groups, blocks = weight.shape[:2]
    tiles = _tiles(groups, blocks, silu_mul, m)
    args = x, weight, weight_scale, global_scale, dtype, pdl, tiles
    out = _quack_gemm().gemm(*args)
    return silu_and_mul(out) if silu_mul else out


def _fragment_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor,
    silu_mul: bool,
    fp32_out: bool,
    pdl: bool,
    max_gemv_tokens: int,
) -> torch.Tensor:
    n = FRAGMENT_BLOCK * weight.shape[0]
    dtype = torch.float32 if fp32_out else torch.bfloat16
    return x.new_empty((x.shape[0], n // 2 if silu_mul else n), dtype=dtype)


# Opaque to torch.compile: what it does depends on how many tokens there are.
direct_register_custom_op(
    "flint_fragment_linear", fragment_linear, fake_impl=_fragment_linear_fake
)
