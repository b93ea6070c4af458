# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs a decode-attention variant's PTX in the emulator."""

import struct

import numpy as np
import torch
from vllm.models.flint.ops.attention.config import (
    GROUP,
    RECORD,
    DecodeConfig,
    DecodeSpec,
    grid_clusters,
)

from ptx.compiled import compiled_files
from ptx.emulator import GlobalMemory, PtxKernel
from support.attention import Problem


def decode_kernel(spec: DecodeSpec, config: DecodeConfig) -> PtxKernel:
    """Compiles a variant."""
    from vllm.models.flint.ops.attention.compile import compile_decode

    return PtxKernel(compiled_files(compile_decode, spec, config)["ptx"].decode())


class DecodeRun:
    """A kernel with a problem's tensors in memory; `launch` may be repeated.

    Attributes:
        splits: clusters that left a part of a request to be merged, in the last launch.
    """

    splits: int

    def __init__(self, kernel: PtxKernel, config: DecodeConfig, problem: Problem):
        self.kernel, self.config, self.problem = kernel, config, problem
        self.batch, heads, _ = problem.q.shape
        self.kv_heads = heads // GROUP
        self.counters = np.zeros(self.batch * heads, np.int32)

    def launch(self, target: int) -> torch.Tensor:
        """Runs with a split target; returns BF16 [B, H, 128], unwritten ones NaN."""
        problem, memory = self.problem, GlobalMemory()
        clusters = grid_clusters(self.batch, target)
        shape = (clusters, self.kv_heads, GROUP, RECORD)
        records = np.full(shape, np.nan, np.float32)
        out = torch.full_like(problem.q, float("nan"))
        bits = out.view(torch.int16).numpy()

        def tensor(array: np.ndarray, form: str, *values: int) -> bytes:
            return struct.pack("<Q" + form, memory.add(array), *values)

        q = problem.q.view(torch.int16).numpy()
        cache, strides, offset = problem.flat_cache()
        base = memory.add(cache) + offset
        blocks, _, page, _ = problem.kv_cache.shape
        tables = problem.block_tables.numpy()
        params = [
            tensor(q, "ii qq", *q.shape[:2], q.shape[1] * 128, 128),
            struct.pack("<Qiii4xqqq", base, blocks, self.kv_heads, page, *strides),
            tensor(tables, "ii q", *tables.shape, tables.shape[1]),
            tensor(problem.seq_lens.numpy(), "i4x", self.batch),
            tensor(problem.sinks.numpy(), "i4x", q.shape[1]),
            tensor(bits, "ii qq", *q.shape[:2], q.shape[1] * 128, 128),
            tensor(records, "ii q", *shape[:2], shape[1] * GROUP * RECORD),
            tensor(self.counters, "i4x", self.counters.size),
        ]
        for scale in (problem.k_scale, problem.v_scale):
            if scale is not None:
                params.append(tensor(scale.numpy(), ""))
        params += [
            struct.pack("<i", problem.window or 0x7FFFFFFF),
            struct.pack("<i", target),
            struct.pack("<f", problem.scale),
        ]
        ctas = clusters * self.kv_heads * self.config.cluster
        self.kernel.run(ctas, self.config.cluster, params, memory)
        self.splits = int((~np.isnan(records)).any((1, 2, 3)).sum())
        return out
