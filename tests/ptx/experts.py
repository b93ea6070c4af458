# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs the expert kernels' PTX in the emulator."""

import struct

import torch
from vllm.models.flint.ops.experts.spec import (
    DownConfig,
    DownSpec,
    GateUpConfig,
    GateUpSpec,
)
from vllm.models.flint.ops.gemv.packing import pack_codes

from ptx.compiled import compiled_files
from ptx.emulator import GlobalMemory, PtxKernel
from support.experts import Experts, SharedLinear


class ExpertRun:
    """Packs tensors as the kernels' parameters; tensors stay alive with it."""

    def __init__(self):
        self.memory = GlobalMemory()
        self.params: list[bytes] = []

    def add(self, tensor: torch.Tensor | None, form: str = "", *values: int) -> None:
        """Adds a tensor whose dynamic sizes and strides are `values`."""
        if tensor is None:
            return
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        place = self.memory.add(tensor.numpy())
        self.params.append(struct.pack("<Q" + form, place, *values))

    def add_experts(self, experts: Experts, packed: bool) -> None:
        weight = pack_codes(experts.weight) if packed else experts.weight
        for tensor in (weight, experts.scales, experts.alpha):
            self.add(tensor, "i4x", experts.count)

    def add_shared(self, shared: SharedLinear | None) -> None:
        for tensor in () if shared is None else shared.operands:
            self.add(tensor)


def unwritten(*shape: int) -> torch.Tensor:
    """BF16 output memory, poisoned."""
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def run_gate_up(
    spec: GateUpSpec,
    config: GateUpConfig,
    x: torch.Tensor,
    ids: torch.Tensor,
    experts: Experts,
    shared: SharedLinear | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compiles and runs a variant; arguments as in `moe_gemv.gate_up`.

    Returns:
        BF16 activations of the routed experts and of the shared one.
    """
    from vllm.models.flint.ops.experts.compile import compile_gate_up

    kernel = PtxKernel(compiled_files(compile_gate_up, spec, config)["ptx"].decode())
    m, pairs = len(x), ids.numel()
    act = unwritten(pairs, spec.width)
    shared_act = None if shared is None else unwritten(m, spec.shared_width)
    run = ExpertRun()
    run.add(x, "i4xq", m, x.stride(0))
    run.add(ids, "i4x", pairs)
    run.add_experts(experts, spec.routed.form == "packed")
    run.add(act, "i4x", pairs)
    run.add_shared(shared)
    run.add(shared_act, "i4x", m)
    ctas = pairs * (spec.width // config.rows)
    ctas += -(-m // 8) * (spec.shared_width // config.rows)
    kernel.run(ctas, 1, run.params, run.memory)
    return act, shared_act


def run_down(
    spec: DownSpec,
    config: DownConfig,
    act: torch.Tensor,
    ids: torch.Tensor,
    tw: torch.Tensor,
    experts: Experts,
    shared: tuple[torch.Tensor, SharedLinear] | None,
) -> torch.Tensor:
    """Compiles and runs a variant; arguments as in `moe_gemv.down_combine`."""
    from vllm.models.flint.ops.experts.compile import compile_down

    kernel = PtxKernel(compiled_files(compile_down, spec, config)["ptx"].decode())
    m, pairs = len(ids), ids.numel()
    out = unwritten(m, spec.width)
    run = ExpertRun()
    run.add(act, "i4x", pairs)
    run.add(ids, "i4x", pairs)
    run.add(tw, "i4x", pairs)
    run.add_experts(experts, spec.routed.form == "packed")
    if shared is not None:
        run.add(shared[0], "i4x", m)
        run.add_shared(shared[1])
    run.add(out, "i4x", m)
    groups = -(-m // config.tokens)
    ctas = groups * (spec.width // config.rows)
    kernel.run(ctas, 1, run.params, run.memory, width=groups)
    return out
