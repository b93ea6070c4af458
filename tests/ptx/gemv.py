# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compiles a GEMV variant without a GPU and runs its PTX in the emulator."""

import struct

import numpy as np

from ptx.compiled import compiled_files
from ptx.emulator import GlobalMemory, PtxKernel, f32_to_bf16


def compile_files(spec, config) -> dict[str, bytes]:
    """Compiles a variant for CUTE_DSL_ARCH; returns its ``ptx`` and ``cubin``."""
    from vllm.models.flint.ops.gemv.compile import compile_gemv

    return compiled_files(compile_gemv, spec, config)


def compile_ptx(spec, config) -> str:
    """PTX of a variant for the target in CUTE_DSL_ARCH."""
    return compile_files(spec, config)["ptx"].decode()


def run_gemv(text, spec, config, x, weight, scales=None, global_scale=None, norm=()):
    """Runs the kernel on NumPy data.

    Args:
        text: PTX of the variant.
        x: BF16 bits, uint16 [M, row stride >= K].
        weight: uint8 [N, K/2], BF16 bits uint16 [N, K], or fragments.
        scales: E4M3 bytes, swizzled or as fragments.
        global_scale: Python float.
        norm: for a normed x: BF16 bits of the residual [M, K], whose rows may be one,
            of the norm's weight, and where to write the new residual.

    Returns:
        Output as float64 [M, N or N/2]; unwritten elements are NaN.
    """
    kernel = PtxKernel(text)
    memory = GlobalMemory()
    m, rows = len(x), len(weight)
    n = 64 * rows if spec.layout == "fragments" else rows
    width = n // spec.parts
    out = np.full((m, width), -1, np.int32 if spec.fp32_out else np.int16)
    params = [
        struct.pack("<Qi4xq", memory.add(x), m, x.shape[1]),
        struct.pack("<Qi4x", memory.add(weight), rows),
    ]
    if scales is not None:
        params.append(struct.pack("<Qi4x", memory.add(scales), scales.size // 4))
        scale = np.array([global_scale], np.float32)
        params.append(struct.pack("<Q", memory.add(scale)))
    params.append(struct.pack("<Qiiq", memory.add(out), m, width, width))
    if norm:
        residual, norm_weight, total = norm
        stride = residual.strides[0] // 2
        place = memory.add(residual if stride else residual[:1])
        params += [
            struct.pack("<Qi4xq", place, m, stride),
            struct.pack("<Q", memory.add(norm_weight)),
            struct.pack("<Qi4x", memory.add(total), m),
        ]
    ctas = config.grid_rows(n, spec) * config.k_ctas
    kernel.run(ctas, config.k_ctas, params, memory)
    if spec.fp32_out:
        return out.view(np.float32).astype(np.float64)
    return (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)


def random_x(rng, m, k, extra=0):
    """BF16 bits [m, k + extra] and their values [m, k]."""
    bits = f32_to_bf16(rng.standard_normal((m, k + extra)).astype(np.float32))
    values = (bits[:, :k] << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.uint16), values


def run_dequantize(k, form, weight, scales):
    """BF16 bits [N, K] from the dequantization kernel, as float64."""
    from vllm.models.flint.ops.gemv.compile import compile_dequantize

    kernel = PtxKernel(compiled_files(compile_dequantize, k, form)["ptx"].decode())
    memory = GlobalMemory()
    n = len(weight)
    out = np.full((n, k), -1, np.int16)
    params = [
        struct.pack("<Qi4x", memory.add(weight), n),
        struct.pack("<Qi4x", memory.add(scales), scales.size),
        struct.pack("<Qi4x", memory.add(out), n),
    ]
    kernel.run(-(-n * (k // 16) // 256), 1, params, memory)
    return (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
