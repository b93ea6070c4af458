# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Flint's weights from a GGUF file with NVFP4, BF16, F16 and F32 tensors.

GGML keeps NVFP4 in blocks of 64 values: four E4M3 scales, then 32 bytes of E2M1
codes. Repacking to ModelOpt's layout moves bits and changes no value.
"""

import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from .configs import FlintConfig
from .errors import FlintCheckpointError
from .gguf_checkpoint import NVFP4, PLAIN_TYPES, FlintGGUF, module_of
from .gguf_file import GGUFTensor, open_gguf
from .gguf_names import checkpoint_name

GROUP_SIZE = 16
_BLOCK = 64
_BLOCK_BYTES = _BLOCK // GROUP_SIZE + _BLOCK // 2
# Of the names of an NVFP4 weight, of its scales and of its global scale.
_SUFFIXES = ("", "_scale", "_scale_2")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Values expanded at a time: FP32 temporaries stay far below one tensor's size.
_CHUNK = 1 << 22
# Bytes of stacked experts that are repacked at a time, or one expert.
_STACK_BYTES = 16 << 20


def find_gguf_file(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> str | None:
    """Find the one GGUF file that a model name stands for.

    Args:
        model: A .gguf file, a directory, or a hub repository.
        revision: Revision of the repository.
        download_dir: Where to keep what is downloaded; the hub's cache by default.

    Returns:
        The file's path, downloaded if need be, or None where `model` has none.

    Raises:
        FlintCheckpointError: `model` has several GGUF files, or is one that does not
            exist.

    """
    if model.endswith(".gguf"):
        if not os.path.isfile(model):
            raise FlintCheckpointError(
                f"{model}: no such file; give the path of a GGUF file"
            )
        return model
    if os.path.isdir(model):
        names = sorted(p.name for p in Path(model).glob("*.gguf"))
    else:
        names = sorted(list_filtered_repo_files(model, ["*.gguf"], revision))
    if not names:
        return None
    if len(names) > 1:
        raise FlintCheckpointError(
            f"{model} has {len(names)} GGUF files ({', '.join(names)}); give the path "
            "of the one to serve"
        )
    folder = model
    if not os.path.isdir(model):
        # The loaders' package imports this module.
        from vllm.model_executor.model_loader.weight_utils import (
            download_weights_from_hf,
        )

        folder = download_weights_from_hf(model, download_dir, names, revision)
    return os.path.join(folder, names[0])


def repack_nvfp4(
    tensor: GGUFTensor, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change an NVFP4 tensor from GGML's blocks to ModelOpt's layout.

    Args:
        tensor: [..., N, K] values of type NVFP4.
        device: Where to do it, and where the result is.

    Returns:
        Codes, uint8 [..., N, K / 2], two consecutive values a byte with the first in
        the low nibble; and scales, E4M3 [..., N, K / 16].

    Raises:
        FlintCheckpointError: A scale byte is 0xFF, which is not a number.

    """
    *rows, k = tensor.shape
    # A copy: torch has no read-only tensors, and the mapping is one.
    data = torch.from_numpy(tensor.data.copy()).to(device)
    blocks = data.reshape(*rows, k // _BLOCK, _BLOCK_BYTES)
    num_scales = _BLOCK // GROUP_SIZE
    scales = blocks[..., :num_scales]
    if (scales == 0xFF).any():
        raise FlintCheckpointError(
            f"{tensor.name} has the scale byte 0xFF, which is not a number; the file "
            "is damaged: download or quantize it again"
        )
    # The scales are unsigned: GGML ignores the top bit and reads 0x7F as zero.
    scales = scales & 0x7F
    scales.masked_fill_(scales == 0x7F, 0)
    # Byte j of a group holds value j in its low nibble and value j + 8 in the high.
    packed = blocks[..., num_scales:].reshape(*rows, k // GROUP_SIZE, GROUP_SIZE // 2)
    codes = torch.cat((packed & 0xF, packed >> 4), dim=-1)
    weight = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return (
        weight.reshape(*rows, k // 2),
        scales.reshape(*rows, k // GROUP_SIZE).view(torch.float8_e4m3fn),
    )


def dequantize_nvfp4(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Expand NVFP4 weights in ModelOpt's layout.

    Args:
        weight: Codes, uint8 [..., N, K / 2].
        weight_scale: Scales, E4M3 [..., N, K / 16], in row-major order.
        global_scale: FP32 scalar, or one a leading index of `weight`; None leaves it
            out, and the result is then exact in BF16.
        out_dtype: The result's dtype; FP32 products are rounded to it once.

    Returns:
        Weights, [..., N, K].

    """
    k = weight.shape[-1] * 2
    table = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=weight.device)
    byte = torch.arange(256, device=weight.device)
    pairs = torch.stack((table[byte & 0xF], table[byte >> 4]), dim=-1)
    codes = weight.reshape(-1, k // 2)
    scales = weight_scale.reshape(-1, k // GROUP_SIZE)
    out = torch.empty((len(codes), k), dtype=out_dtype, device=weight.device)
    factors = None
    if global_scale is not None:
        factors = global_scale.to(torch.float32).reshape(-1, 1)
        factors = factors.repeat_interleave(len(codes) // len(factors), dim=0)
    rows = max(1, _CHUNK // k)
    for start in range(0, len(codes), rows):
        part = slice(start, start + rows)
        values = pairs[codes[part].int()].reshape(-1, k // GROUP_SIZE, GROUP_SIZE)
        values *= scales[part].to(torch.float32).unsqueeze(-1)
        values = values.reshape(-1, k)
        if factors is not None:
            values *= factors[part]
        out[part] = values
    return out.reshape(*weight.shape[:-1], k)


def gguf_nvfp4_weights_iterator(
    path: str | os.PathLike,
    config: FlintConfig,
    nvfp4_modules: set[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    use_tqdm: bool = True,
    device: torch.device | str = "cpu",
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Read a GGUF file's weights under their safetensors names.

    One matrix, or a few experts', are in memory at a time.

    Args:
        path: The GGUF file.
        config: The model's configuration.
        nvfp4_modules: Modules to leave in NVFP4, of those that
            `FlintGGUF.nvfp4_modules` names; None for all of these. The others are
            expanded to `dtype`.
        dtype: What other weights are converted to, with one rounding.
        use_tqdm: Whether to show a progress bar, in bytes.
        device: Where NVFP4 weights are repacked and come out; the others come out
            on the host.

    Yields:
        Name and tensor; an NVFP4 weight comes as `weight`, `weight_scale` and
        `weight_scale_2` in ModelOpt's layout.

    Raises:
        FlintCheckpointError: The file is damaged or does not fit the model.

    """
    model = FlintGGUF(open_gguf(path), config)
    keep = model.nvfp4_modules()
    if nvfp4_modules is not None:
        keep &= nvfp4_modules
    with tqdm(
        total=sum(t.data.nbytes for t in model.weights.values()),
        desc="Loading GGUF weights",
        unit="B",
        unit_scale=True,
        disable=not use_tqdm,
    ) as progress:
        for gguf_name in model.weights:
            for names, stack, scales in _stacks(model, gguf_name):
                kept = module_of(names[0]) in keep
                yield from _tensors(names, stack, scales, kept, dtype, device)
                progress.update(stack.data.nbytes)


def _tensors(
    names: list[str],
    stack: GGUFTensor,
    scales: torch.Tensor,
    kept: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a stack holds; nothing of it stays in memory afterwards."""
    if stack.type_name != NVFP4:
        yield from zip(names, _plain(stack, dtype), strict=True)
    elif kept:
        parts = (*repack_nvfp4(stack, device), scales.unsqueeze(-1))
        for name, *matrix in zip(names, *parts, strict=True):
            for suffix, part in zip(_SUFFIXES, matrix, strict=True):
                yield f"{name}{suffix}", part
    else:
        parts = (*repack_nvfp4(stack, device), scales.to(device))
        yield from zip(names, dequantize_nvfp4(*parts, dtype), strict=True)


def _stacks(
    model: FlintGGUF, gguf_name: str
) -> Iterator[tuple[list[str], GGUFTensor, torch.Tensor]]:
    """Cut stacked experts into a few at a time; another tensor is a stack of one.

    Yields:
        Checkpoint names, their tensors as one of a dimension more, and their global
        scales: FP32, as many as names, or none for a type that has none.

    """
    tensor = model.weights[gguf_name]
    name = checkpoint_name(gguf_name)
    assert name is not None
    scales = torch.empty(0)
    if tensor.type_name == NVFP4:
        scales = model.global_scale(gguf_name)
    count, shape = 1, tensor.shape
    if "{}" in name:
        count, shape = tensor.shape[0], tensor.shape[1:]
    data = tensor.data.reshape(count, -1)
    step = max(1, _STACK_BYTES // data[0].nbytes)
    for start in range(0, count, step):
        part = data[start : start + step]
        names = [name.format(start + i) for i in range(len(part))]
        stack = replace(tensor, shape=(len(part), *shape), data=part)
        yield names, stack, scales[start : start + step]


def _plain(tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    # A copy: torch has no read-only tensors, and the mapping is one.
    data = torch.from_numpy(tensor.data.copy())
    return data.view(PLAIN_TYPES[tensor.type_name]).reshape(tensor.shape).to(dtype)
