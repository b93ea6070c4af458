# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The PTX instructions that `emulator` knows and that whole warps or CTAs execute."""

import numpy as np

from ptx.emulator import EmulationError, bf16_to_f32
from ptx.instructions import names_of

U32, U64 = np.uint32, np.uint64


def _shfl(c, opcode, operands, who):
    kind = opcode.split(".")[2]
    if len(who) % 32 or kind not in ("idx", "up", "bfly"):
        raise EmulationError(opcode)
    values = c.value(operands[1], who).reshape(-1, 32)
    offset = c.value(operands[2], who).reshape(-1, 32).astype(np.int64) & 31
    lane = np.arange(32)
    if kind == "idx":
        source = offset
    elif kind == "bfly":
        source = lane ^ offset
    else:
        source = np.where(lane >= offset, lane - offset, lane)
    out = np.take_along_axis(values, source, axis=1)
    c.set(operands[0].split("|")[0], who, out.reshape(-1))


def _redux(c, opcode, operands, who):
    kind = opcode.split(".")[2]
    if len(who) % 32 or kind not in ("add", "max") or not opcode.endswith("s32"):
        raise EmulationError(opcode)
    values = c.value(operands[1], who).astype(U32).view(np.int32).reshape(-1, 32)
    out = values.sum(axis=1) if kind == "add" else values.max(axis=1)
    c.set(operands[0], who, np.repeat(out.astype(np.int32).view(U32), 32))


def _mma(c, opcode, operands, who):
    if "m16n8k16.row.col.f32.bf16.bf16.f32" not in opcode or len(who) % 32:
        raise EmulationError(opcode)
    warps = len(who) // 32
    lane = np.arange(32)
    g, t = lane // 4, lane % 4

    def halves(name):
        bits = c.value(name, who).astype(U32).reshape(warps, 32)
        pair = [bf16_to_f32(bits & U32(0xFFFF)), bf16_to_f32(bits >> U32(16))]
        return [x.reshape(warps, 32) for x in pair]

    a = np.zeros((warps, 16, 16))
    b = np.zeros((warps, 16, 8))
    acc = np.zeros((warps, 16, 8))
    for i, name in enumerate(names_of(operands[1])):
        for h, x in enumerate(halves(name)):
            a[:, g + 8 * (i % 2), 2 * t + h + 8 * (i // 2)] = x
    for i, name in enumerate(names_of(operands[2])):
        for h, x in enumerate(halves(name)):
            b[:, 2 * t + h + 8 * i, g] = x
    for i, name in enumerate(names_of(operands[3])):
        acc[:, g + 8 * (i // 2), 2 * t + i % 2] = c.f32(name, who).reshape(warps, 32)
    out = (acc + a @ b).astype(np.float32)
    for i, name in enumerate(names_of(operands[0])):
        c.set_f32(name, who, out[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1))


def _vote(c, opcode, operands, who):
    if len(who) % 32 or opcode != "vote.sync.ballot.b32":
        raise EmulationError(opcode)
    lanes = c.regs[operands[1]][who].astype(U64).reshape(-1, 32)
    masks = (lanes << np.arange(32, dtype=U64)).sum(axis=1, dtype=U64)
    c.set(operands[0], who, np.repeat(masks, 32))


def _popc(c, opcode, operands, who):
    bits = np.ascontiguousarray(c.value(operands[1], who).astype(U32))
    c.set(operands[0], who, np.unpackbits(bits.view(np.uint8)).reshape(-1, 32).sum(1))


def _bar(c, opcode, operands, who):
    if opcode == "bar.warp.sync":
        return _bar_warp(c, who)
    for r in np.unique(c.rank[who]):
        c._wait(who[c.rank[who] == r], _All(c, int(r), int(c.pc[who[0]])))


def _bar_warp(c, who):
    """Holds once all live threads of a warp wait at the same barrier."""
    pc = c.pc[who[0]]
    for warp in np.unique(who // 32):
        threads = np.arange(32 * warp, 32 * warp + 32)

        def all_there(threads=threads) -> bool:
            live = threads[~c.done[threads]]
            return bool(np.all(c.blocked[live] & (c.pc[live] == pc)))

        c._wait(who[who // 32 == warp], all_there)


class _All:
    """Holds once all live threads of a CTA wait at the same barrier."""

    def __init__(self, c, rank, pc):
        self.c, self.rank, self.pc = c, rank, pc
        self.passed = False

    def __call__(self):
        c = self.c
        live = (c.rank == self.rank) & ~c.done
        return bool(np.all(c.blocked[live] & (c.pc[live] == self.pc)))


HANDLERS = {
    "bar": _bar,
    "mma": _mma,
    "popc": _popc,
    "redux": _redux,
    "shfl": _shfl,
    "vote": _vote,
}
