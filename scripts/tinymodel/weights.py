# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The tiny models' weights, each a function of seed and tensor name alone.

Only the raw PCG64 stream is used: NumPy promises that one for ever, but not the
distributions on top of it.

The values are chosen so that a wrong engine is seen and a right one passes:
norm weights away from 1, sinks that matter, logits spread over several units,
and routing that rounding cannot flip. For the last, the first `num_experts`
hidden channels carry each token's choice of experts in its embedding; every
router row reads one of them, and nothing in the residual stream writes to them.
"""

import hashlib
import zlib
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from tinymodel.layout import TensorDef, tensor_defs
from tinymodel.nvfp4 import E2M1, E4M3, GROUP, Nvfp4Matrix
from tinymodel.specs import TinySpec

# bf16: plain BF16 values. nvfp4: exact NVFP4 with tensor scales that are powers
# of two, so that BF16 holds the dequantized weights. nvfp4-odd: other scales.
FAMILIES = ("bf16", "nvfp4", "nvfp4-odd")

# Output magnitude for an input of magnitude 1; equal for roles that an engine
# fuses. Query and key are normed, so theirs cannot be seen.
_GAIN = {
    "query": 2.0,
    "key": 2.0,
    "value": 2.0,
    "attn_out": 0.7,
    "gate": 1.5,
    "up": 1.5,
    "down": 0.6,
    "head": 4.0,
}
_SILENT_ROLES = frozenset(("attn_out", "down"))

# Most scale bytes come from three octaves, the rest from anywhere below the fourth.
# Where these start differs, so that tensor scales differ between matrices too.
_FIRST_SCALE = 0x50
_COMMON_SCALES = 24
_OCTAVE = 8
_ANY_SCALE_SHARE = 1 / 16


def _uniform(
    seed: int, name: str, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0
) -> NDArray[np.float64]:
    key = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    raw = np.random.PCG64(key).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (low + (high - low) * unit).reshape(shape)


def _spread(
    seed: int, name: str, shape: tuple[int, ...], rms: float
) -> NDArray[np.float64]:
    edge = rms * sqrt(3)
    return _uniform(seed, name, shape, -edge, edge)


def bf16_bits(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Rounds finite values to BF16, half to even, and returns the bit patterns."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _to_bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)


def _embedding(spec: TinySpec, seed: int, d: TensorDef) -> NDArray[np.float64]:
    values = _spread(seed, d.name, d.shape, 1.0)
    order = _uniform(seed, d.name + "/experts", (spec.vocab_size, spec.num_experts))
    rank = order.argsort(axis=1).argsort(axis=1)
    top = spec.num_experts_per_tok
    chosen = 3.0 - 2.25 * rank / max(top - 1, 1)
    values[:, : spec.num_experts] = np.where(rank < top, chosen, -3.0)
    return values


def _router(spec: TinySpec, seed: int, d: TensorDef) -> NDArray[np.float64]:
    values = _spread(seed, d.name, d.shape, 0.2 / sqrt(spec.hidden_size))
    channel = _uniform(seed, d.name + "/channels", (spec.num_experts,)).argsort()
    values[:, : spec.num_experts] = 0.0
    values[np.arange(spec.num_experts), channel] = 2.0
    return values


def _rms(d: TensorDef) -> float:
    return _GAIN[d.role] / sqrt(d.shape[1])


def _tensor_scale(seed: int, family: str, d: TensorDef) -> tuple[int, float]:
    """Returns the first common scale byte and the tensor scale, equal in a fusion."""
    usual = E4M3[_FIRST_SCALE : _FIRST_SCALE + _COMMON_SCALES].astype(np.float64)
    wanted = _rms(d) / sqrt(float(np.mean(E2M1**2) * np.mean(usual**2)))
    octaves = int(_uniform(seed, d.fused + "/octaves", (1,), 0, 3)[0])
    first = _FIRST_SCALE + _OCTAVE * octaves
    if family == "nvfp4":
        power = 2.0 ** np.rint(np.log2(wanted))
        # Scale bytes are nearly logarithmic: they make up for the rounding.
        first += int(np.rint(_OCTAVE * np.log2(wanted / power)))
        wanted = power
    else:
        wanted *= _uniform(seed, d.fused + "/odd", (1,), 0.75, 1.25)[0]
    return first, float(np.float32(wanted / 2**octaves))


def nvfp4_matrix(spec: TinySpec, seed: int, family: str, d: TensorDef) -> Nvfp4Matrix:
    """Returns the NVFP4 form of matrix `d` in an nvfp4 family."""
    codes = _uniform(seed, d.name + "/codes", d.shape, 0, 16).astype(np.uint8)
    first, tensor_scale = _tensor_scale(seed, family, d)
    groups = (d.shape[0], d.shape[1] // GROUP)
    common = _uniform(seed, d.name + "/common", groups, first, first + _COMMON_SCALES)
    highest = min(first + _COMMON_SCALES + _OCTAVE, len(E4M3))
    anything = _uniform(seed, d.name + "/any", groups, 0, highest)
    pick = _uniform(seed, d.name + "/pick", groups) < _ANY_SCALE_SHARE
    scales = np.where(pick, anything, common).astype(np.uint8)
    if d.role in _SILENT_ROLES:
        scales[: spec.num_experts] = 0
    return Nvfp4Matrix(codes, scales, tensor_scale)


def matrix(
    spec: TinySpec, seed: int, family: str, d: TensorDef
) -> Nvfp4Matrix | NDArray[np.float32]:
    """Returns matrix `d` as its family stores it: NVFP4, or float32 BF16 values."""
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, not {family!r}")
    if family != "bf16":
        return nvfp4_matrix(spec, seed, family, d)
    values = _spread(seed, d.name, d.shape, _rms(d))
    if d.role in _SILENT_ROLES:
        values[: spec.num_experts] = 0.0
    return _to_bf16(values)


def _unquantized(spec: TinySpec, seed: int, d: TensorDef) -> NDArray[np.float64]:
    if d.role == "embed":
        return _embedding(spec, seed, d)
    if d.role == "router":
        return _router(spec, seed, d)
    if d.role == "norm":
        return _uniform(seed, d.name, d.shape, 0.75, 1.25)
    if d.role == "head_norm":
        return _uniform(seed, d.name, d.shape, 0.8, 1.8)
    return _uniform(seed, d.name, d.shape, *spec.sink_range)


def tensor(spec: TinySpec, seed: int, family: str, d: TensorDef) -> NDArray[np.float32]:
    """Returns tensor `d` as the safetensors file holds it: BF16 values in float32."""
    if not d.is_matrix:
        return _to_bf16(_unquantized(spec, seed, d))
    stored = matrix(spec, seed, family, d)
    return _to_bf16(stored.dequantize() if isinstance(stored, Nvfp4Matrix) else stored)


def checksum(spec: TinySpec, seed: int, family: str) -> str:
    """Returns the SHA-256 of every tensor's name and BF16 values, in hex."""
    digest = hashlib.sha256()
    for d in tensor_defs(spec):
        digest.update(d.name.encode())
        digest.update(bf16_bits(tensor(spec, seed, family, d)).astype("<u2").tobytes())
    return digest.hexdigest()
