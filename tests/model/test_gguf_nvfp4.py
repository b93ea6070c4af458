# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""NVFP4 out of GGUF: every code, every scale byte and every tensor, bit for bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from vllm.models.flint import gguf_nvfp4
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.gguf_checkpoint import FlintGGUF
from vllm.models.flint.gguf_file import GGUFTensor, open_gguf
from vllm.models.flint.gguf_nvfp4 import (
    dequantize_nvfp4,
    gguf_nvfp4_weights_iterator,
    repack_nvfp4,
)

from support.damaged_gguf import TINY, on, write_edited
from tinymodel import write_gguf, write_safetensors
from tinymodel.gguf_file import GgufTensor
from tinymodel.specs import config_json

CONFIG = FlintConfig(**config_json(TINY))


def every_code_and_scale() -> np.ndarray:
    """GGML blocks: a row for each scale byte but 0xFF, with all 16 codes each."""
    blocks = np.zeros((255, 36), np.uint8)
    blocks[:, :4] = np.arange(255, dtype=np.uint8)[:, None]
    # Both nibbles of a group's eight bytes run through different codes.
    low, high = np.arange(8), np.arange(15, 7, -1)
    blocks[:, 4:] = np.tile(low | high << 4, 4)
    return blocks


def test_every_code_and_scale_byte() -> None:
    blocks = every_code_and_scale()
    tensor = GGUFTensor("every", "NVFP4", (255, 64), blocks.reshape(-1))
    weight, weight_scale = repack_nvfp4(tensor)
    assert weight.shape == (255, 32) and weight.dtype == torch.uint8
    assert weight_scale.shape == (255, 4)
    assert weight_scale.dtype == torch.float8_e4m3fn
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
    assert codes.tolist() == [[*range(8), *range(15, 7, -1)] * 4] * 255
    wanted = gguf.quants.dequantize(blocks, GGMLQuantizationType.NVFP4)
    # The package works with doubled codes and halved scales; both are exact.
    exact = torch.from_numpy(wanted.reshape(255, 64))
    got = dequantize_nvfp4(weight, weight_scale, out_dtype=torch.float64)
    assert torch.equal(got, exact.double())
    assert torch.equal(dequantize_nvfp4(weight, weight_scale).double(), exact.double())


def test_zero_scale_has_two_spellings() -> None:
    blocks = np.full((1, 36), 0x22, np.uint8)
    blocks[0, :4] = (0x00, 0x7F, 0x80, 0x38)
    tensor = GGUFTensor("zeros", "NVFP4", (1, 64), blocks.reshape(-1))
    values = dequantize_nvfp4(*repack_nvfp4(tensor))
    assert values[0, :48].eq(0).all() and values[0, 48:].eq(1).all()


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_scale_byte_ff_is_refused(at: int) -> None:
    blocks = every_code_and_scale()
    blocks[100, at] = 0xFF
    tensor = GGUFTensor("bad", "NVFP4", (255, 64), blocks.reshape(-1))
    with pytest.raises(ValueError, match="bad has the scale byte 0xFF"):
        repack_nvfp4(tensor)


def test_dequantize_rounds_once() -> None:
    torch.manual_seed(0)
    weight = torch.randint(0, 256, (3, 5, 32), dtype=torch.uint8)
    weight_scale = torch.randint(0, 0x7F, (3, 5, 4), dtype=torch.uint8)
    weight_scale = weight_scale.view(torch.float8_e4m3fn)
    scale = torch.tensor([0.3, 1.7e-3, 41.0])
    got = dequantize_nvfp4(weight, weight_scale, scale)
    unscaled = dequantize_nvfp4(weight, weight_scale, out_dtype=torch.float32)
    assert torch.equal(got, (unscaled * scale[:, None, None]).bfloat16())


@pytest.mark.parametrize("family", ["nvfp4", "nvfp4-odd", "bf16"])
def test_whole_file_equals_safetensors(tmp_path: Path, family: str) -> None:
    write_safetensors(tmp_path / "bf16", TINY, 0, family)
    write_gguf(tmp_path / "model.gguf", TINY, 0, family)
    wanted = load_file(tmp_path / "bf16" / "model.safetensors")
    got = dict(
        gguf_nvfp4_weights_iterator(
            tmp_path / "model.gguf", CONFIG, nvfp4_modules=set(), use_tqdm=False
        )
    )
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_kept_in_nvfp4(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY, 0, "nvfp4-odd")
    expanded = dict(gguf_nvfp4_weights_iterator(path, CONFIG, set(), use_tqdm=False))
    kept = dict(gguf_nvfp4_weights_iterator(path, CONFIG, use_tqdm=False))
    packed = [n for n, t in kept.items() if t.dtype == torch.uint8]
    assert "lm_head.weight" in packed
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in packed
    for name in packed:
        scale = kept.pop(f"{name}_scale_2")
        assert scale.shape == (1,) and scale.dtype == torch.float32
        values = dequantize_nvfp4(kept.pop(name), kept.pop(f"{name}_scale"), scale)
        assert torch.equal(values, expanded.pop(name)), name
    assert kept.keys() == expanded.keys()


def test_mixed_types(tmp_path: Path) -> None:
    """A fused linear with one BF16 part is expanded; other types keep their values."""

    def to_bf16(tensor: GgufTensor):
        values = np.ones((64, 256), np.uint8)
        yield GgufTensor(tensor.name, values, GGMLQuantizationType.BF16)

    def to_f16(tensor: GgufTensor):
        yield GgufTensor(
            tensor.name, tensor.data.astype(np.float16), GGMLQuantizationType.F16
        )

    def edit(tensor: GgufTensor):
        if tensor.name == "blk.0.attn_k.scale":
            return ()
        change = {"blk.0.attn_k.weight": to_bf16, "output_norm.weight": to_f16}
        return change.get(tensor.name, lambda t: (t,))(tensor)

    path = write_edited(tmp_path / "model.gguf", edit)
    modules = FlintGGUF(open_gguf(path), CONFIG).nvfp4_modules()
    assert not {f"model.layers.0.self_attn.{x}_proj" for x in "qkv"} & modules
    assert "model.layers.0.self_attn.o_proj" in modules
    assert "model.layers.1.self_attn.k_proj" in modules
    got = dict(gguf_nvfp4_weights_iterator(path, CONFIG, use_tqdm=False))
    assert got["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert got["model.norm.weight"].dtype == torch.bfloat16
    plain = write_edited(tmp_path / "plain.gguf", on("none", to_f16))
    wanted = dict(gguf_nvfp4_weights_iterator(plain, CONFIG, use_tqdm=False))
    assert torch.equal(got["model.norm.weight"], wanted["model.norm.weight"])


def test_one_stack_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the iterator has yielded is held by it, but for a stack."""
    import gc
    import weakref

    monkeypatch.setattr(gguf_nvfp4, "_STACK_BYTES", 1)
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY, 0, "nvfp4")
    last = None
    for _, tensor in gguf_nvfp4_weights_iterator(path, CONFIG, set(), use_tqdm=False):
        gc.collect()
        assert last is None or last() is None
        last = weakref.ref(tensor)
        del tensor


@pytest.mark.parametrize("modules", [None, set()], ids=["nvfp4", "expanded"])
def test_stacks_of_any_size_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: set[str] | None
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY, 0, "nvfp4")
    expert = TINY.moe_intermediate_size * TINY.hidden_size // 64 * 36
    found = []
    for size in (1 << 24, 1, 3 * expert):
        monkeypatch.setattr(gguf_nvfp4, "_STACK_BYTES", size)
        weights = gguf_nvfp4_weights_iterator(path, CONFIG, modules, use_tqdm=False)
        found.append(list(weights))
    for weights in found[1:]:
        for (name, tensor), (other, same) in zip(found[0], weights, strict=True):
            assert name == other and tensor.dtype == same.dtype
            assert torch.equal(tensor.float(), same.float())
