# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A GGUF file is mapped, its names are translated, and damage is one message."""

from pathlib import Path

import numpy as np
import pytest

from vllm.models.flint.gguf_file import GGUFFileError, open_gguf
from vllm.models.flint.gguf_names import checkpoint_name, scale_name

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_uint32("flint.block_count", 1)
    writer.add_tensor("output_norm.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_and_metadata(file: Path):
    opened = open_gguf(file)
    assert opened.metadata["flint.block_count"] == 1
    (tensor,) = opened.tensors.values()
    assert (tensor.name, tensor.type_name) == ("output_norm.weight", "F32")
    assert tensor.data.view(np.float32).tolist() == list(range(8))


@pytest.mark.parametrize("left", [0, 3, 40, -4])
def test_truncated_file_is_refused(file: Path, left: int):
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(GGUFFileError, match="model.gguf: "):
        open_gguf(file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("output.weight", "lm_head.weight"),
        ("blk.3.attn_sinks.weight", "model.layers.3.self_attn.softmax_offset"),
        (
            "blk.7.ffn_up_exps.weight",
            "model.layers.7.mlp.experts.{}.up_proj.weight",
        ),
        ("blk.03.attn_q.weight", None),
        ("rope_freqs.weight", None),
    ],
)
def test_names(name: str, expected: str | None):
    assert checkpoint_name(name) == expected


def test_scale_stands_beside_its_weight():
    assert scale_name("blk.1.attn_q.weight") == "blk.1.attn_q.scale"
