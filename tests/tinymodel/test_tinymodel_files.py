# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The files of a tiny checkpoint: both formats hold the same, or nothing at all."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors import safe_open

from tinymodel import SPECS, TinySpec, checkpoint, write_gguf, write_safetensors
from tinymodel.checkpoint import OutputExistsError
from tinymodel.layout import tensor_defs
from tinymodel.specs import config_json

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "tinymodel"

NAMES = [
    r"model\.(embed_tokens|norm)\.weight",
    r"lm_head\.weight",
    r"model\.layers\.\d+\.(input|post_attention)_layernorm\.weight",
    r"model\.layers\.\d+\.self_attn\.([qkvo]_proj|[qk]_norm)\.weight",
    r"model\.layers\.\d+\.self_attn\.softmax_offset",
    r"model\.layers\.\d+\.mlp\.(shared_expert\.|experts\.\d+\.)?"
    r"(gate|up|down)_proj\.weight",
    r"model\.layers\.\d+\.mlp\.gate\.weight",
]


def read_safetensors(directory: Path) -> dict[str, np.ndarray]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118


def values(t: ReaderTensor) -> np.ndarray:
    """Returns a GGUF tensor in float32, as the gguf package reads it."""
    if t.tensor_type == GGMLQuantizationType.F32:
        return np.array(t.data)
    return dequantize(t.data, t.tensor_type)


@pytest.mark.parametrize("family", ["bf16", "nvfp4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_both_formats_hold_the_same_values(
    tmp_path: Path, spec: TinySpec, family: str
) -> None:
    write_safetensors(tmp_path / "hf", spec, 0, family)
    write_gguf(tmp_path / "m.gguf", spec, 0, family)
    ours = read_safetensors(tmp_path / "hf")
    theirs = {t.name: t for t in GGUFReader(tmp_path / "m.gguf").tensors}
    used = set()
    for d in tensor_defs(spec):
        t = theirs[d.gguf]
        used.add(d.gguf)
        value = values(t)
        scale_name = d.gguf.removesuffix("weight") + "scale"
        if family == "nvfp4" and d.is_matrix:
            assert t.tensor_type == GGMLQuantizationType.NVFP4
            used.add(scale_name)
            scale = theirs[scale_name]
            assert scale.tensor_type == GGMLQuantizationType.F32
            experts = 1 if d.expert is None else spec.num_experts
            assert scale.data.shape == (experts,)
            factor = scale.data.reshape(-1, *[1] * (value.ndim - 1))
            value = value * (factor if d.expert is not None else factor.item())
        else:
            assert scale_name not in theirs
        if d.expert is not None:
            value = value[d.expert]
        assert value.shape == d.shape
        assert np.array_equal(value, ours[d.name]), d.name
    assert used == theirs.keys()
    assert ours.keys() == {d.name for d in tensor_defs(spec)}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_tensors_have_the_checkpoint_names(spec: TinySpec) -> None:
    matched = Counter(
        next((p for p in NAMES if re.fullmatch(p, d.name)), d.name)
        for d in tensor_defs(spec)
    )
    assert matched.keys() == set(NAMES)


def test_gguf_metadata(tmp_path: Path) -> None:
    spec = SPECS["tiny"]
    write_gguf(tmp_path / "m.gguf", spec)
    fields = {
        name: field.contents()
        for name, field in GGUFReader(tmp_path / "m.gguf").fields.items()
    }
    assert fields["general.architecture"] == "flint"
    assert fields["flint.block_count"] == 5
    assert fields["flint.attention.sliding_window"] == 17
    assert fields["flint.attention.sliding_window_pattern"] == [
        *(False, False, True, True, False)
    ]
    assert fields["flint.expert_count"] == 8
    assert fields["flint.expert_used_count"] == 2
    assert fields["flint.rope.freq_base"] == 10000.0
    assert "general.tensor_extra.prec_a4" not in fields


def test_config_names_the_layers_without_positions() -> None:
    config = config_json(SPECS["tiny"])
    assert config["no_rope_layer_indices"] == [0, 1, 4]
    assert config["layer_types"][2:4] == ["sliding_attention"] * 2
    assert json.loads(json.dumps(config)) == config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True
    )


def test_command_line(tmp_path: Path) -> None:
    first = run("--spec", "tiny", "--format", "both", "--out", str(tmp_path))
    assert (first.returncode, first.stderr) == (0, "")
    paths = [Path(line) for line in first.stdout.splitlines()]
    assert paths == [tmp_path / "bf16", tmp_path / "gguf/flint-tiny-nvfp4.gguf"]
    assert sorted(os.listdir(tmp_path / "bf16")) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    again = run("--out", str(tmp_path))
    assert again.returncode == 1
    assert "exists" in again.stderr and "Traceback" not in again.stderr

    assert run("--out", str(tmp_path), "--overwrite").returncode == 0
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_command_line_says_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--out", str(tmp_path / "file" / "deeper"))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "cannot write" in result.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_checkpoint_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type | Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint.tokenizer, "write", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_safetensors(tmp_path / "hf", SPECS["tiny"])
    assert not list(tmp_path.iterdir())


def test_an_interrupted_gguf_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinymodel.gguf_file.write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, SPECS["tiny"], overwrite=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_existing_outputs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")
    with pytest.raises(OutputExistsError, match="m.gguf"):
        write_gguf(path, SPECS["tiny"])
    with pytest.raises(OutputExistsError, match="exists"):
        write_safetensors(tmp_path, SPECS["tiny"])
    assert path.read_text() == "old"
