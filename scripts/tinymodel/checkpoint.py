# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Writes a tiny checkpoint in the safetensors form."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinymodel import tokenizer
from tinymodel.layout import tensor_defs
from tinymodel.specs import TinySpec, config_json, generation_config_json
from tinymodel.weights import bf16_bits, tensor


class OutputExistsError(FileExistsError):
    """The output is already there and was not to be replaced."""


@contextmanager
def new_directory(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Gives a directory to fill that becomes `target` when the block succeeds.

    Args:
        target: The directory to make. Nothing of it is seen before the end, and
            nothing is left if the block fails or is interrupted.
        overwrite: Replace a `target` that is there already.

    Raises:
        OutputExistsError: If `target` exists and `overwrite` is false.
    """
    if target.exists() and not overwrite:
        raise OutputExistsError(f"{target} exists: choose another path or overwrite it")
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh = stage / "new"
        fresh.mkdir()
        yield fresh
        if target.exists():
            target.rename(stage / "old")
        fresh.rename(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_safetensors(
    directory: Path,
    spec: TinySpec,
    seed: int = 0,
    family: str = "bf16",
    overwrite: bool = False,
) -> None:
    """Writes config, BF16 weights, tokenizer and chat template to `directory`.

    An NVFP4 family is written as its dequantization, rounded to BF16; for family
    "nvfp4" that rounding changes nothing.

    Raises:
        OutputExistsError: If `directory` exists and `overwrite` is false.
    """
    import torch
    from safetensors.torch import save_file

    with new_directory(directory, overwrite) as fresh:
        tensors = {
            d.name: torch.from_numpy(
                bf16_bits(tensor(spec, seed, family, d)).view("int16")
            ).view(torch.bfloat16)
            for d in tensor_defs(spec)
        }
        weights = fresh / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # the library leaves it readable by its owner alone
        for name, content in (
            ("config.json", config_json(spec)),
            ("generation_config.json", generation_config_json()),
        ):
            text = json.dumps(content, indent=2) + "\n"
            (fresh / name).write_text(text, encoding="utf-8")
        tokenizer.write(fresh, spec.max_position_embeddings)
