# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The PTX instructions that `emulator` knows."""

import numpy as np

from ptx.emulator import (
    _E2M1,
    EmulationError,
    bf16_to_f32,
    e4m3_to_f32,
    f32_to_bf16,
)

U32, U64 = np.uint32, np.uint64
_MASK = {8: 0xFF, 16: 0xFFFF, 32: 0xFFFFFFFF, 64: 2**64 - 1}


def _width(opcode: str) -> int:
    for part in reversed(opcode.split(".")):
        if part == "pred":
            return 1
        digits = part.lstrip("bsuf")
        if part[0] in "bsuf" and digits.isdigit():
            return int(digits)
    raise EmulationError(f"no width in {opcode}")


def _signed(bits: np.ndarray, width: int) -> np.ndarray:
    shift = np.uint64(64 - width)
    return ((bits << shift).view(np.int64)) >> np.int64(64 - width)


def _integers(c, opcode, operands, who):
    width = _width(opcode)
    signed = any(x.startswith("s") and x[1:].isdigit() for x in opcode.split("."))
    values = [c.value(x, who) for x in operands]
    return [_signed(x, width) if signed else x & U64(_MASK[width]) for x in values]


def _store_int(c, opcode, name, who, x, width=None):
    width = width or _width(opcode)
    c.set(name, who, x.astype(np.int64).view(U64) & U64(_MASK[width]))


def _arithmetic(function):
    def run(c, opcode, operands, who):
        parts = opcode.split(".")
        if "hi" in parts:
            return _mul_hi(c, opcode, operands, who)
        if parts[-1] == "f32":
            values = [c.f32(x, who) for x in operands[1:]]
            with np.errstate(all="ignore"):
                c.set_f32(operands[0], who, function(*values))
        elif parts[-1] in ("bf16", "bf16x2"):
            values = [c.value(x, who).astype(U32) for x in operands[1:]]
            out = np.zeros(len(who), U32)
            for shift in (0, 16) if parts[-1] == "bf16x2" else (0,):
                halves = [bf16_to_f32((x >> U32(shift)) & U32(0xFFFF)) for x in values]
                out |= f32_to_bf16(function(*halves)) << U32(shift)
            c.set(operands[0], who, out)
        else:
            values = _integers(c, opcode, operands[1:], who)
            width = 2 * _width(opcode) if "wide" in parts else _width(opcode)
            with np.errstate(over="ignore"):
                _store_int(c, opcode, operands[0], who, function(*values), width)

    return run


def _mul_hi(c, opcode, operands, who):
    if not opcode.startswith("mul.hi.") or opcode.endswith("64"):
        raise EmulationError(f"unknown instruction {opcode}")
    a, b = _integers(c, opcode, operands[1:], who)
    product = a * b
    width = product.dtype.type(_width(opcode))
    _store_int(c, opcode, operands[0], who, product >> width)


def _logic(function):
    def run(c, opcode, operands, who):
        if opcode.endswith("pred"):
            values = [c.regs[x][who] for x in operands[1:]]
            c.set(operands[0], who, function(*values))
        else:
            _store_int(
                c,
                opcode,
                operands[0],
                who,
                function(*_integers(c, opcode, operands[1:], who)),
            )

    return run


def _divide(a, b):
    if a.dtype == np.float32:
        return a / b
    # Toward zero.
    return (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b)


def _shift_left(x, amount):
    return x << amount.astype(x.dtype)


def _shift_right(x, amount):
    return x >> amount.astype(x.dtype)


def _shf(c, opcode, operands, who):
    low, high, amount = (c.value(x, who) for x in operands[1:])
    if not opcode.startswith("shf.r.wrap"):
        raise EmulationError(opcode)
    both = (high << U64(32)) | low
    c.set(operands[0], who, (both >> (amount & U64(31))) & U64(_MASK[32]))


def _lop3(c, opcode, operands, who):
    a, b, d = (c.value(x, who) for x in operands[1:4])
    table = int(operands[4], 0)
    out = np.zeros(len(who), U64)
    for index in range(8):
        if table >> index & 1:
            term = np.full(len(who), _MASK[32], U64)
            for bit, x in ((4, a), (2, b), (1, d)):
                term &= x if index & bit else ~x
            out |= term
    c.set(operands[0], who, out & U64(_MASK[32]))


def _prmt(c, opcode, operands, who):
    low, high, select = (c.value(x, who) for x in operands[1:])
    both = (high << U64(32)) | (low & U64(_MASK[32]))
    out = np.zeros(len(who), U64)
    for i in range(4):
        nibble = (select >> U64(4 * i)) & U64(15)
        byte = (both >> ((nibble & U64(7)) * U64(8))) & U64(0xFF)
        sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
        byte = np.where(nibble & U64(8), sign, byte)
        out |= byte << U64(8 * i)
    c.set(operands[0], who, out)


def _mov(c, opcode, operands, who):
    target, source = operands
    if target.startswith("{"):
        names = [x.strip() for x in target.strip("{}").split(",")]
        bits = c.value(source, who)
        width = _width(opcode) // len(names)
        for i, name in enumerate(names):
            c.set(name, who, (bits >> U64(width * i)) & U64(_MASK[width]))
    elif source.startswith("{"):
        names = [x.strip() for x in source.strip("{}").split(",")]
        width = _width(opcode) // len(names)
        bits = np.zeros(len(who), U64)
        for i, name in enumerate(names):
            bits |= (c.value(name, who) & U64(_MASK[width])) << U64(width * i)
        c.set(target, who, bits)
    elif opcode.endswith("pred"):
        c.set(target, who, c.regs[source][who])
    else:
        c.set(target, who, c.value(source, who) & U64(_MASK[_width(opcode)]))


def _setp(c, opcode, operands, who):
    compare = opcode.split(".")[1]
    if opcode.endswith("f32"):
        a, b = (c.f32(x, who) for x in operands[1:])
    else:
        a, b = _integers(c, opcode, operands[1:], who)
    out = {
        "eq": a == b,
        "ne": a != b,
        "lt": a < b,
        "le": a <= b,
        "gt": a > b,
        "ge": a >= b,
    }[compare]
    c.set(operands[0], who, out)


def _selp(c, opcode, operands, who):
    a, b = (c.value(x, who) for x in operands[1:3])
    out = np.where(c.regs[operands[3]][who], a, b)
    c.set(operands[0], who, out & U64(_MASK[_width(opcode)]))


def _cvt(c, opcode, operands, who):
    parts = opcode.split(".")
    target, source = parts[-2], parts[-1]
    name = operands[0]
    if source == "e2m1x2":
        byte = c.value(operands[1], who).astype(np.int64)
        low, high = f32_to_bf16(_E2M1[byte & 15]), f32_to_bf16(_E2M1[byte >> 4 & 15])
        c.set(name, who, low | high << U32(16))
    elif (target, source) == ("f16x2", "e4m3x2"):
        bits = c.value(operands[1], who)
        pair = [e4m3_to_f32(bits >> U64(n) & U64(0xFF)) for n in (0, 8)]
        low, high = (x.astype(np.float16).view(np.uint16).astype(U32) for x in pair)
        c.set(name, who, low | high << U32(16))
    elif source == "e4m3x2":
        bits = c.value(operands[1], who)
        low = f32_to_bf16(e4m3_to_f32(bits & U64(0xFF)))
        high = f32_to_bf16(e4m3_to_f32(bits >> U64(8) & U64(0xFF)))
        c.set(name, who, low | high << U32(16))
    elif (target, source) == ("bf16x2", "f32"):
        high, low = (f32_to_bf16(c.f32(x, who)) for x in operands[1:])
        c.set(name, who, low | high << U32(16))
    elif (target, source) == ("bf16", "f32"):
        c.set(name, who, f32_to_bf16(c.f32(operands[1], who)))
    elif (target, source) == ("f32", "bf16"):
        c.set_f32(name, who, bf16_to_f32(c.value(operands[1], who)))
    elif (target, source) == ("f32", "f32") and "sat" in parts:
        c.set_f32(name, who, np.clip(c.f32(operands[1], who), 0, 1))
    elif target[0] in "su" and source[0] in "su":
        bits = c.value(operands[1], who)
        width = int(source[1:])
        x = _signed(bits, width) if source[0] == "s" else bits & U64(_MASK[width])
        _store_int(c, opcode, name, who, x, int(target[1:]))
    else:
        raise EmulationError(f"unknown conversion {opcode}")


def _vector(opcode: str) -> int:
    return int(next((x[1:] for x in opcode.split(".") if x in ("v2", "v4")), 1))


def names_of(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{}").split(",")]


def _ld(c, opcode, operands, who):
    count, size = _vector(opcode), _width(opcode) // 8
    if ".param" in opcode:
        place, _, offset = operands[1].strip("[]").partition("+")
        value = c.params[int(place.rsplit("_", 1)[1])]
        start = int(offset or 0)
        data = np.frombuffer(value[start : start + count * size], np.uint8)
        data = np.broadcast_to(data, (len(who), count * size))
    elif ".global" in opcode:
        data = c.memory.load(c.address(operands[1], who), count * size)
    else:
        address = c.address(operands[1], who)
        if np.any(address % (count * size)):
            raise EmulationError("misaligned shared load")
        columns = address[:, None] + np.arange(count * size)
        data = c.shared[c.rank[who][:, None], columns]
    for i, name in enumerate(names_of(operands[0])):
        raw = np.zeros((len(who), 8), np.uint8)
        raw[:, :size] = data[:, i * size : (i + 1) * size]
        c.set(name, who, raw.view(U64)[:, 0])


def _atom(c, opcode, operands, who):
    if ".global.add.u32" not in opcode:
        raise EmulationError(opcode)
    addresses = c.address(operands[1], who)
    values = c.value(operands[2], who).astype(U32)
    before = np.empty(len(who), U32)
    for i, value in enumerate(values):
        place = addresses[i : i + 1]
        before[i] = c.memory.load(place, 4).view(U32)[0, 0]
        total = np.array([[before[i] + value]], U32)
        c.memory.store(place, total.view(np.uint8))
    c.set(operands[0], who, before)


def _bytes(c, opcode, operand, who) -> np.ndarray:
    size = _width(opcode) // 8
    values = [c.value(x, who)[:, None].view(np.uint8) for x in names_of(operand)]
    return np.concatenate([x[:, :size] for x in values], axis=1)


def _st(c, opcode, operands, who):
    if opcode.startswith("st.async"):
        return _st_async(c, opcode, operands, who)
    data = _bytes(c, opcode, operands[1], who)
    address = c.address(operands[0], who)
    if ".global" in opcode:
        c.memory.store(address, data)
        return
    if np.any(address % data.shape[1]):
        raise EmulationError("misaligned shared store")
    columns = address[:, None] + np.arange(data.shape[1])
    c.shared[c.rank[who][:, None], columns] = data


def _st_async(c, opcode, operands, who):
    data = _bytes(c, opcode, operands[1], who)
    address = c.address(operands[0], who)
    barrier = c.address(operands[2], who)
    rank, address = address >> 24, address & 0xFFFFFF
    c.shared[rank[:, None], address[:, None] + np.arange(data.shape[1])] = data
    for r, b in zip(barrier >> 24, barrier & 0xFFFFFF, strict=True):
        c.barriers[int(r), int(b)][1] -= data.shape[1]


def _mapa(c, opcode, operands, who):
    address, rank = (c.value(x, who) for x in operands[1:])
    c.set(operands[0], who, (rank << U64(24)) | address)


def _mbarrier(c, opcode, operands, who):
    kind = opcode.split(".")[1]
    place = operands[0] if kind == "init" else operands[1]
    addresses = c.address(place, who)
    if kind == "init":
        counts = c.value(operands[1], who)
        for r, a, n in zip(c.rank[who], addresses, counts, strict=True):
            c.barriers[int(r), int(a)] = [int(n), 0]
    elif kind == "arrive":
        for r, a, n in zip(
            c.rank[who], addresses, c.value(operands[2], who), strict=True
        ):
            state = c.barriers[int(r), int(a)]
            state[0] -= 1
            state[1] += int(n)
    elif kind == "try_wait":
        c.set(operands[0], who, True)
        for r in np.unique(c.rank[who]):
            mine = who[c.rank[who] == r]
            key = (int(r), int(addresses[c.rank[who] == r][0]))
            c._wait(mine, lambda key=key: c.barriers[key] == [0, 0])
    else:
        raise EmulationError(opcode)


def _barrier(c, opcode, operands, who):
    if ".arrive" in opcode:
        c.arrived[who] = True
    else:
        c._wait(who, lambda: bool(np.all(c.arrived | c.done)))


def _bra(c, opcode, operands, who):
    c.pc[who] = c.kernel.labels[operands[0]]


def _ret(c, opcode, operands, who):
    c.done[who] = True


def _nothing(c, opcode, operands, who):
    """Has no effect that is modelled."""


# fmt: off
HANDLERS = {
    "abs": _arithmetic(np.abs), "add": _arithmetic(np.add),
    "and": _logic(np.bitwise_and), "barrier": _barrier, "bra": _bra,
    "cvt": _cvt, "ex2": _arithmetic(np.exp2), "fence": _nothing,
    "fma": _arithmetic(lambda a, b, d: a.astype(np.float64) * b + d),
    "griddepcontrol": _nothing, "ld": _ld, "lop3": _lop3,
    "mad": _arithmetic(lambda a, b, d: a * b + d), "mapa": _mapa,
    "max": _arithmetic(np.fmax), "mbarrier": _mbarrier,
    "min": _arithmetic(np.fmin), "mov": _mov,
    "mul": _arithmetic(np.multiply), "neg": _arithmetic(np.negative),
    "not": _logic(np.invert), "or": _logic(np.bitwise_or), "prmt": _prmt,
    "rcp": _arithmetic(np.reciprocal), "ret": _ret, "selp": _selp, "setp": _setp,
    "rsqrt": _arithmetic(lambda a: np.float32(1) / np.sqrt(a)),
    "shf": _shf, "shl": _logic(_shift_left), "shr": _logic(_shift_right),
    "st": _st, "sub": _arithmetic(np.subtract), "xor": _logic(np.bitwise_xor),
    "atom": _atom, "div": _arithmetic(_divide),
}
# fmt: on
