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


def can_chain(x: torch.Tensor, pdl: bool) -> bool:
    """Whether a launch may start early, if asked to; SM90 is the first that can."""
    return pdl and x.is_cuda and current_gpu().capability >= (9, 0)


def chained(early: bool) -> dict[str, bool]:
    """Constants and options of a launch that starts early, or not."""
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
