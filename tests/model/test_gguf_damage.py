# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Every damaged or foreign GGUF file is refused with one clear error."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.gguf_checkpoint import FlintGGUF
from vllm.models.flint.gguf_file import GGUFFileError, open_gguf
from vllm.models.flint.gguf_nvfp4 import find_gguf_file, gguf_nvfp4_weights_iterator

from support.damaged_gguf import TINY, as_type, drop, on, scaled, write_edited
from tinymodel.gguf_file import GgufTensor
from tinymodel.specs import config_json

CONFIG = FlintConfig(**config_json(TINY))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edited(tmp_path_factory.mktemp("whole") / "model.gguf")


def check(path: Path) -> FlintGGUF:
    return FlintGGUF(open_gguf(path), CONFIG)


def test_whole_file_is_accepted(whole: Path) -> None:
    assert "model.layers.0.self_attn.q_proj" in check(whole).nvfp4_modules()


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, 0.5, 0.99, -40])
def test_truncated(whole: Path, tmp_path: Path, keep: float) -> None:
    data = whole.read_bytes()
    size = int(keep * len(data)) if isinstance(keep, float) else keep
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:size])
    with pytest.raises(GGUFFileError, match="download it again") as error:
        check(path)
    assert str(path) in str(error.value)


def test_wrong_magic(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + whole.read_bytes()[4:])
    with pytest.raises(GGUFFileError, match="magic"):
        check(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(GGUFFileError, match="No such file"):
        open_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (on("blk.2.attn_k.weight", drop), r"tensors are missing: .*2.self_attn.k_pr"),
        (on("blk.2.attn_sinks.weight", drop), "softmax_offset"),
        (on("blk.2.ffn_up_exps.weight", drop), r"mlp\.experts\.\{\}\.up_proj"),
        (on("blk.2.attn_k.scale", drop), "blk.2.attn_k.scale, the global scale"),
        (
            on("output_norm.weight", lambda t: (t, replace(t, name="blk.0.bias"))),
            "tensors that Flint does not: blk.0.bias",
        ),
        (
            on("output_norm.weight", lambda t: (t, replace(t, name="blk.07.x.scale"))),
            "tensors that Flint does not: blk.07.x.scale",
        ),
        (
            on("output_norm.weight", lambda t: (replace(t, data=t.data[:64]),)),
            r"output_norm.weight has shape \[64\], but the config asks for \[128\]",
        ),
        (
            on("blk.1.ffn_down.weight", as_type(GGMLQuantizationType.Q8_0, 136)),
            "blk.1.ffn_down.weight has type Q8_0; served are",
        ),
        (
            on("blk.0.attn_v.scale", scaled(0, 2.0)),
            r"attn_q.scale\[0\] is .* but blk.0.attn_v.scale\[0\] .*one global scale",
        ),
        (
            on("blk.3.ffn_up_exps.scale", scaled(5, 0.5)),
            r"ffn_gate_exps.scale\[5\] is .* but blk.3.ffn_up_exps.scale\[5\] is",
        ),
        (
            on("blk.3.ffn_down_exps.scale", scaled(5, float("nan"))),
            "not a positive number",
        ),
        (
            on(
                "blk.3.ffn_down_exps.scale",
                lambda t: (replace(t, data=t.data[:4]),),
            ),
            r"is F32 \[4\], but has to be F32 \[8\]",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, edit, message: str) -> None:
    path = write_edited(tmp_path / "model.gguf", edit)
    with pytest.raises(GGUFFileError, match=message):
        check(path)


def test_another_architecture(tmp_path: Path) -> None:
    path = write_edited(tmp_path / "model.gguf", architecture="qwen3moe")
    with pytest.raises(GGUFFileError, match="architecture is 'qwen3moe', not 'flint'"):
        check(path)


@pytest.mark.parametrize("marks", [[True, False], [False, True]])
def test_four_bit_activations(tmp_path: Path, marks: list[bool]) -> None:
    key = "general.tensor_extra.prec_a4"
    path = write_edited(
        tmp_path / "model.gguf", metadata=lambda w: w.add_array(key, marks)
    )
    with pytest.raises(GGUFFileError, match="4-bit activations"):
        check(path)


def test_no_four_bit_activations(tmp_path: Path) -> None:
    key = "general.tensor_extra.prec_a4"
    path = write_edited(
        tmp_path / "model.gguf", metadata=lambda w: w.add_bool(key, False)
    )
    check(path)


def test_scale_byte_ff(tmp_path: Path) -> None:
    def poison(tensor: GgufTensor):
        data = tensor.data.copy()
        data[2, 7, 36 + 1] = 0xFF
        yield replace(tensor, data=data)

    path = write_edited(tmp_path / "m.gguf", on("blk.4.ffn_up_exps.weight", poison))
    with pytest.raises(ValueError, match="blk.4.ffn_up_exps.weight has the scale byte"):
        for _ in gguf_nvfp4_weights_iterator(path, CONFIG, use_tqdm=False):
            pass


def test_config_of_another_model(whole: Path) -> None:
    other = FlintConfig(**config_json(replace(TINY, num_experts=4)))
    with pytest.raises(GGUFFileError, match="belong together"):
        FlintGGUF(open_gguf(whole), other)


def test_two_files(whole: Path, tmp_path: Path) -> None:
    assert find_gguf_file(str(whole.parent)) == str(whole)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        find_gguf_file(str(tmp_path))


def test_no_file(tmp_path: Path) -> None:
    assert find_gguf_file(str(tmp_path)) is None
    with pytest.raises(ValueError, match="no such file"):
        find_gguf_file(str(tmp_path / "absent.gguf"))


def test_overlapping_tensors(whole: Path, tmp_path: Path) -> None:
    reader = open_gguf(whole)
    data = bytearray(whole.read_bytes())
    # The offset is the last field of a tensor's entry, after name, shape and type.
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    offset = np.frombuffer(data[at : at + 8], np.uint64)[0]
    assert offset % 32 == 0 and reader.tensors
    data[at : at + 8] = np.uint64(offset - 32).tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFFileError, match="overlap"):
        open_gguf(path)
