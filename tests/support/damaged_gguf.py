# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""GGUF files of the tiny model with one thing wrong."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from tinymodel.gguf_file import (
    ARCHITECTURE,
    GgufTensor,
    add_metadata,
    gguf_tensors,
    write_tensors,
)
from tinymodel.specs import SPECS

TINY = SPECS["tiny"]
Edit = Callable[[GgufTensor], Iterable[GgufTensor]]


def write_edited(
    path: Path,
    edit: Edit = lambda tensor: (tensor,),
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
    architecture: str = ARCHITECTURE,
) -> Path:
    """Writes the tiny model's GGUF, each tensor replaced by what `edit` makes of it."""
    writer = GGUFWriter(path, architecture)
    try:
        add_metadata(writer, TINY, "nvfp4")
        metadata(writer)
        write_tensors(
            writer, (new for t in gguf_tensors(TINY, 0, "nvfp4") for new in edit(t))
        )
    finally:
        writer.close()
    return path


def on(name: str, change: Edit) -> Edit:
    """Applies `change` to the tensor called `name` alone."""

    def edit(tensor: GgufTensor) -> Iterable[GgufTensor]:
        return change(tensor) if tensor.name == name else (tensor,)

    return edit


def drop(tensor: GgufTensor) -> Iterable[GgufTensor]:
    """Leaves the tensor out."""
    return ()


def as_type(kind: GGMLQuantizationType, row_bytes: int) -> Edit:
    """Declares zeros of another type in the tensor's place."""

    def edit(tensor: GgufTensor) -> Iterable[GgufTensor]:
        rows = tensor.data.shape[:-1]
        yield GgufTensor(tensor.name, np.zeros((*rows, row_bytes), np.uint8), kind)

    return edit


def scaled(index: int, factor: float) -> Edit:
    """Multiplies one of a `.scale` tensor's values."""

    def edit(tensor: GgufTensor) -> Iterable[GgufTensor]:
        data = tensor.data.copy()
        data[index] *= np.float32(factor)
        yield replace(tensor, data=data)

    return edit
