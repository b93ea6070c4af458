# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs a compiled kernel's PTX on the CPU, for tests on machines without a GPU.

It knows the instructions that the kernels use and raises on any other. All threads
of a cluster run in NumPy lanes; divergent threads run in program order. Every access to
global memory must lie inside one tensor and be aligned, shared memory starts out
poisoned, and barriers that can never complete are errors. Timing, caches and memory
ordering are not modelled: races need a GPU and compute-sanitizer.
"""

import re

import numpy as np

_SHARED_BASE = 1024
_GUARD = 1 << 12
U32 = np.uint32


class EmulationError(Exception):
    """The kernel did something that a GPU must not, or that is not modelled."""


class GlobalMemory:
    """Tensors at separate addresses; nothing lies between them."""

    def __init__(self):
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._next = 1 << 20

    def add(self, array: np.ndarray) -> int:
        """Maps a contiguous array; returns its address."""
        if not array.flags.c_contiguous:
            raise ValueError("array must be contiguous")
        address = self._next
        self._arrays.append((address, array.reshape(-1).view(np.uint8)))
        self._next = (address + array.nbytes + _GUARD) // _GUARD * _GUARD + _GUARD
        return address

    def _find(self, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if np.any(address % size):
            raise EmulationError(f"misaligned {size}-byte access")
        for base, data in self._arrays:
            if base <= int(address[0]) < base + data.size:
                offset = address - base
                if np.any(offset + size > data.size):
                    break
                return data, offset
        raise EmulationError(f"global access out of bounds at {int(address[0]):#x}")

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        out = np.empty((address.size, size), np.uint8)
        for where in _by_region(address):
            data, offset = self._find(address[where], size)
            out[where] = data[offset[:, None] + np.arange(size)]
        return out

    def store(self, address: np.ndarray, values: np.ndarray) -> None:
        size = values.shape[1]
        for where in _by_region(address):
            data, offset = self._find(address[where], size)
            data[offset[:, None] + np.arange(size)] = values[where]


def _by_region(address: np.ndarray):
    """All at once: a kernel's instruction touches one tensor."""
    return [np.arange(address.size)] if address.size else []


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(U32) << U32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; returns 16 bits in uint32."""
    bits = np.ascontiguousarray(x, np.float32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FC0), rounded).astype(U32)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def e4m3_to_f32(byte: np.ndarray) -> np.ndarray:
    byte = byte.astype(np.int64)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(
        exponent == 0,
        mantissa * 2.0**-9,
        (8 + mantissa) * np.exp2(exponent.astype(np.float64) - 10),
    )
    value = np.where((byte & 0x7F) == 0x7F, np.nan, value)
    return np.where(byte & 0x80, -value, value).astype(np.float32)


def _parse(text: str):
    """Splits PTX into (guard, negated, opcode, operands) and label positions."""
    body = text[text.index("{", text.index(".reqntid")) + 1 :]
    body = _unique_labels(re.sub(r"//[^\n]*", "", body))
    program: list[tuple[str | None, bool, str, list[str]]] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        s = statement.strip()
        while True:
            s = s.lstrip("{} \t\n")
            label = re.match(r"([$\w]+):", s)
            if not label:
                break
            labels[label[1]] = len(program)
            s = s[label.end() :]
        s = " ".join(s.split())
        if not s or s.startswith("."):
            continue
        guard, negated = None, False
        match = re.match(r"@(!?)(%?\w+)\s+", s)
        if match:
            guard, negated = match[2], match[1] == "!"
            s = s[match.end() :]
        opcode, _, rest = s.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        program.append((guard, negated, opcode, operands))
    return program, labels


def _unique_labels(body: str) -> str:
    """Numbers the labels of inline waits, which are the same in each."""
    count = iter(range(len(body)))

    def number(wait: re.Match[str]) -> str:
        index = next(count)
        return re.sub(r"\b(LAB_WAIT|DONE)\b", rf"\g<1>_{index}", wait[0])

    return re.sub(r"LAB_WAIT:.*?DONE:", number, body, flags=re.DOTALL)


class PtxKernel:
    """One entry point of a PTX file."""

    def __init__(self, text: str):
        self.program, self.labels = _parse(text)
        block = re.search(r"\.reqntid (\d+)", text)
        assert block is not None, "no CTA size in the PTX"
        self.block = int(block[1])
        found = re.findall(r"\.param \.(\w+)[^\n]*_param_\d+(?:\[(\d+)\])?,?\n", text)
        self.param_sizes = [
            int(size) if size else int(kind[1:]) // 8 for kind, size in found
        ]

    def run(
        self,
        ctas: int,
        cluster: int,
        params: list[bytes],
        memory: GlobalMemory,
        width: int | None = None,
    ):
        """Runs all CTAs, one cluster after the other, `width` in a row of the grid.

        Raises:
            EmulationError: bad access, deadlock, or an unknown instruction.
        """
        for size, value in zip(self.param_sizes, params, strict=True):
            if size != len(value):
                raise EmulationError(f"parameter of {size} bytes got {len(value)}")
        for first in range(0, ctas, cluster):
            _Cluster(self, first, cluster, params, memory, width or ctas).run()


class _Cluster:
    """State of one cluster's threads."""

    def __init__(self, kernel, first_cta, ctas, params, memory, width):
        self.kernel, self.params, self.memory = kernel, params, memory
        self.n = ctas * kernel.block
        thread = np.arange(self.n)
        self.rank = thread // kernel.block
        self.tid = (thread % kernel.block).astype(U32)
        self.ctaid = (first_cta + self.rank).astype(U32)
        self.width = U32(width)
        self.pc = np.zeros(self.n, np.int64)
        self.done = np.zeros(self.n, bool)
        self.blocked = np.zeros(self.n, bool)
        self.regs: dict[str, np.ndarray] = {}
        self.shared = np.full((ctas, 1 << 18), 0xFF, np.uint8)
        self.barriers: dict[tuple[int, int], list[int]] = {}
        self.arrived = np.zeros(self.n, bool)
        self.waiting: list = []

    def run(self):
        program = self.kernel.program
        while not self.done.all():
            ready = ~self.done & ~self.blocked
            if not ready.any():
                if not self._release():
                    raise EmulationError("deadlock: no thread can continue")
                continue
            at = int(self.pc[ready].min())
            mask = ready & (self.pc == at)
            guard, negated, opcode, operands = program[at]
            self.pc[mask] += 1
            if guard is not None:
                mask = mask & (self.regs[guard] ^ negated)
            if mask.any():
                self._execute(opcode, operands, np.flatnonzero(mask))

    def _release(self) -> bool:
        """Lets threads past barriers whose condition holds."""
        ready = [entry for entry in self.waiting if entry[1]()]
        for entry in ready:
            self.blocked[entry[0]] = False
            self.waiting.remove(entry)
        return bool(ready)

    def _wait(self, who, condition):
        self.blocked[who] = True
        self.waiting.append((who, condition))

    # Operands -----------------------------------------------------------------

    def value(self, operand: str, who) -> np.ndarray:
        """Bits of an operand for the given threads, as uint64."""
        if operand in self.regs:
            return self.regs[operand][who].astype(np.uint64)
        special = {
            "%tid.x": self.tid,
            "%ctaid.x": self.ctaid % self.width,
            "%ctaid.y": self.ctaid // self.width,
            "%laneid": self.tid % 32,
            "%cluster_ctarank": self.rank,
        }
        if operand in special:
            return special[operand][who].astype(np.uint64)
        if operand.startswith("0f"):
            number = int(operand[2:], 16)
        elif operand.startswith("__dynamic_shmem"):
            number = _SHARED_BASE
        else:
            number = int(operand.rstrip("U"), 0) & (2**64 - 1)
        return np.full(len(who), number, np.uint64)

    def set(self, name: str, who, bits):
        if name == "_":
            return
        if name not in self.regs:
            kind = bool if re.match(r"%?[pP]\d", name) else np.uint64
            self.regs[name] = np.zeros(self.n, kind)
        self.regs[name][who] = bits

    def f32(self, operand, who) -> np.ndarray:
        return self.value(operand, who).astype(U32).view(np.float32)

    def set_f32(self, name, who, x):
        self.set(name, who, np.ascontiguousarray(x, np.float32).view(U32))

    def address(self, operand, who) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self.value(base, who).astype(np.int64) + int(offset or "0", 0)

    # Execution ----------------------------------------------------------------

    def _execute(self, opcode, operands, who):
        from ptx.handlers import HANDLERS

        base = opcode.split(".")[0]
        handler = HANDLERS.get(base)
        if handler is None:
            raise EmulationError(f"unknown instruction {opcode}")
        handler(self, opcode, operands, who)
