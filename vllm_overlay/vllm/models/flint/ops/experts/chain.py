# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Programmatic dependent launch of Triton kernels that follow each other."""

import torch

from vllm.triton_utils import tl, triton

from ..device import current_gpu


@triton.jit
def chain(PDL: tl.constexpr):
    """Waits for the kernel before, and lets the next one start and wait."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def chained(x: torch.Tensor, pdl: bool) -> dict[str, bool]:
    """Arguments of a launch that may start early; SM90 is the first that can."""
    if pdl and x.is_cuda and current_gpu().capability >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
