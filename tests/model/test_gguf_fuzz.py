# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""No byte string makes the GGUF loader crash, hang or read outside the file."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.gguf_file import GGUFFileError, open_gguf
from vllm.models.flint.gguf_nvfp4 import gguf_nvfp4_weights_iterator

from support.damaged_gguf import TINY, write_edited
from tinymodel.specs import config_json

CONFIG = FlintConfig(**config_json(TINY))

# Values that overflow, wrap or point past the end in 32 and 64 bits.
HOSTILE = st.sampled_from(
    [0, 1, 2, 7, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40]
    + [1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_edited(tmp_path_factory.mktemp("fuzz") / "m.gguf").read_bytes()


@pytest.fixture(scope="module")
def header_size(pristine: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(pristine)
    file = open_gguf(path)
    return len(pristine) - sum(t.data.nbytes for t in file.tensors.values())


def load(path: Path) -> None:
    """Reads the whole file; any other error than these is a defect."""
    try:
        for _, tensor in gguf_nvfp4_weights_iterator(path, CONFIG, use_tqdm=False):
            # Touch every byte: a view outside the file would fault here.
            tensor.view(-1).float().sum()
    except GGUFFileError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    except ValueError as error:
        assert "scale byte 0xFF" in str(error)


@settings(
    max_examples=400,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_hostile_header(
    pristine: bytes, header_size: int, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(pristine)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_size - 8))
        form, mask = data.draw(st.sampled_from([("<I", 0xFFFFFFFF), ("<Q", -1)]))
        value = data.draw(HOSTILE)
        struct.pack_into(form, damaged, at, value & mask if mask > 0 else value)
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    load(path)


@settings(
    max_examples=200,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_flipped_bytes_and_cuts(
    pristine: bytes, header_size: int, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(pristine)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, header_size - 1))] = data.draw(
            st.integers(0, 255)
        )
    size = data.draw(st.integers(0, len(damaged)))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged[:size] if data.draw(st.booleans()) else damaged)
    load(path)


@settings(
    max_examples=100,
    deadline=20_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.binary(max_size=4096))
def test_any_bytes(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + tail)
    load(path)
