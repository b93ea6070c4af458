# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The linear layers of Flint."""

from dataclasses import dataclass

from vllm.models.flint.ops.gemv.config import (
    FRAGMENT_BLOCK,
    SCALE_ROWS,
    Layout,
)
from vllm.models.flint.ops.gemv.tables import Shape

HIDDEN = 2048


@dataclass(frozen=True)
class Layer:
    """One linear layer on one rank.

    Attributes:
        n: weight rows; with `silu_mul` gate rows, then up rows.
        k: weight columns.
        silu_mul: whether the layer is gate and up, followed by SiLU and product.
        fp32_out: whether the output is FP32: the head.
    """

    n: int
    k: int
    silu_mul: bool = False
    fp32_out: bool = False

    def shape(self, form: str, layout: Layout) -> Shape:
        """What a tuned table calls it; fragments are padded to whole blocks."""
        n, k = self.n, self.k
        if layout == "fragments":
            n, k = (
                -(-n // SCALE_ROWS) * SCALE_ROWS,
                -(-k // FRAGMENT_BLOCK) * FRAGMENT_BLOCK,
            )
        return Shape(n, k, self.silu_mul, form == "bf16", layout)

    @property
    def name(self) -> str:
        return f"{self.n} x {self.k}" + (" silu" if self.silu_mul else "")


def layers_of(tp: int) -> list[Layer]:
    """The layers of one rank of `tp`; the plain gate and up layers only for `tp` 1."""
    plain = [Layer(12288, HIDDEN), Layer(2048, HIDDEN)] if tp == 1 else []
    found = [
        Layer(5120 // tp, HIDDEN),
        Layer(HIDDEN, 4096 // tp),
        Layer(12288 // tp, HIDDEN, silu_mul=True),
        Layer(HIDDEN, 6144 // tp),
        Layer(2048 // tp, HIDDEN, silu_mul=True),
        Layer(HIDDEN, 1024 // tp),
        *plain,
        Layer(150144 // tp, HIDDEN, fp32_out=True),
    ]
    return list(dict.fromkeys(found))
