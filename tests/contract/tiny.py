# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The tiny models' weights in the form that `reference_forward` takes."""

import torch

from contract.nvfp4 import Nvfp4Weight, pack_codes
from contract.ops import Weight
from tinymodel import TinySpec, matrix, tensor
from tinymodel.layout import tensor_defs
from tinymodel.nvfp4 import Nvfp4Matrix


def tiny_weights(
    spec: TinySpec, seed: int, family: str, prefix: str = ""
) -> dict[str, Weight]:
    """Returns the tensors by safetensors name; NVFP4 families stay quantized.

    Args:
        spec: The model.
        seed: Of its weights.
        family: How they are stored.
        prefix: What the names of the wanted tensors start with.
    """
    weights: dict[str, Weight] = {}
    for d in tensor_defs(spec):
        if not d.name.startswith(prefix):
            continue
        stored = matrix(spec, seed, family, d) if d.is_matrix else None
        if isinstance(stored, Nvfp4Matrix):
            weights[d.name] = Nvfp4Weight(
                pack_codes(torch.from_numpy(stored.codes)),
                torch.from_numpy(stored.scales),
                stored.tensor_scale,
            )
        else:
            weights[d.name] = torch.from_numpy(tensor(spec, seed, family, d))
    return weights
