# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A GGUF file as named, typed and bounds-checked tensors.

The gguf package parses the file. It trusts what it reads, so every count, length and
offset is checked here against the file's size before it is used.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import FlintCheckpointError

if TYPE_CHECKING:
    import gguf

_MAX_ARRAY_LENGTH = 1 << 24
_MAX_DIMS = 4


class GGUFFileError(FlintCheckpointError):
    """A GGUF file that cannot be served; the message says what to do."""

    def __init__(self, path: str | os.PathLike, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: Its name in the file.
        type_name: GGML's name of its type, such as `"NVFP4"` or `"BF16"`.
        shape: Its logical shape, outermost dimension first.
        data: Its bytes in the file, [num_bytes] uint8, mapped and read-only.

    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file.

    Attributes:
        path: Where it is.
        metadata: Scalars, strings and arrays by key.
        tensors: Its tensors by name.

    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Map a GGUF file and check its structure; no tensor data is read.

    Args:
        path: The file.

    Returns:
        Its metadata and tensors.

    Raises:
        GGUFFileError: The file is absent, truncated, damaged or not GGUF.
        ImportError: The gguf package is not installed.

    """
    path = os.fspath(path)
    reader_cls = _bounded_reader()
    try:
        reader = reader_cls(path)
        metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
    except OSError as e:
        raise GGUFFileError(path, f"cannot be read: {e.strerror or e}") from None
    # The parser meets damage as whatever error its next step happens to raise.
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as e:
        raise GGUFFileError(
            path, f"not a GGUF file, or a damaged one ({e}); download it again"
        ) from None
    if reader.byte_order == "S":
        raise GGUFFileError(path, "big-endian GGUF is not served; convert it again")
    tensors = {t.name: _tensor(path, reader, t) for t in reader.tensors}
    _check_overlap(path, reader)
    return GGUFFile(path, metadata, tensors)


def _bounded_reader() -> "type[gguf.GGUFReader]":
    try:
        import gguf
    except ImportError as e:
        raise ImportError(
            "Reading a GGUF file needs the gguf package: pip install 'gguf>=0.19'"
        ) from e

    class BoundedReader(gguf.GGUFReader):
        """Refuses counts and offsets that lie outside the file."""

        def _get(self, offset, dtype, count=1, override_order=None):
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if offset < 0 or count < 0 or end > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(int(offset), dtype, count, override_order)

        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type == gguf.GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, np.uint64)[0])
                if length > _MAX_ARRAY_LENGTH:
                    raise ValueError(f"a metadata array has {length} entries")
            return super()._get_field_parts(orig_offs, raw_type)

        def _get_tensor_info_field(self, orig_offs):
            field = super()._get_tensor_info_field(orig_offs)
            dims, raw_type = field.parts[3], int(field.parts[4][0])
            if len(dims) > _MAX_DIMS:
                raise ValueError(f"{field.name} has {len(dims)} dimensions")
            # Beyond int64 the parser's own products wrap around.
            if np.prod([int(d) for d in dims], dtype=object) >= 1 << 60:
                raise ValueError(f"{field.name} is larger than any file")
            if raw_type not in list(gguf.GGMLQuantizationType):
                raise ValueError(f"{field.name} has the unknown type {raw_type}")
            return field

    return BoundedReader


def _tensor(path: str, reader: "gguf.GGUFReader", tensor: Any) -> GGUFTensor:
    # Offsets are unsigned 64-bit sums, so a damaged one can wrap to before the data.
    if tensor.data_offset < reader.data_offset:
        raise GGUFFileError(path, f"{tensor.name} lies outside the file")
    data = tensor.data.reshape(-1).view(np.uint8)
    return GGUFTensor(
        name=tensor.name,
        type_name=tensor.tensor_type.name,
        shape=tuple(int(d) for d in reversed(tensor.shape)),
        data=data,
    )


def _check_overlap(path: str, reader: "gguf.GGUFReader") -> None:
    end, before = 0, ""
    for tensor in sorted(reader.tensors, key=lambda t: t.data_offset):
        if tensor.data_offset < end:
            raise GGUFFileError(
                path, f"{before} and {tensor.name} overlap; download it again"
            )
        end, before = tensor.data_offset + tensor.n_bytes, tensor.name
