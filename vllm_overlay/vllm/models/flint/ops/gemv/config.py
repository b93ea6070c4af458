# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a GEMV variant computes (``GemvSpec``) and how (``GemvConfig``)."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

# How an NVFP4 weight lies in memory: ModelOpt rows with scales in the 128x4 swizzle
# (``weights``), or fragments of quack's GEMM (``fragments``).
Layout: TypeAlias = Literal["row_major", "fragments"]

# Rows whose scales share one block of the 128x4 swizzle.
SCALE_ROWS = 128
# Rows and width of a block of weights in fragment order.
FRAGMENT_BLOCK = 64
# One mma.sync.m16n8k16: weight rows, tokens.
MMA_ROWS = 16
MMA_TOKENS = 8
_MAX_SHARED_BYTES = 227 * 1024
# Values of x that a thread can hold in registers while their row is normed.
_MAX_NORMED_VALUES = 64


@dataclass(frozen=True)
class GemvSpec:
    """The function: everything of a problem that is fixed at compile time.

    Attributes:
        k: width of a weight row.
        form: decode form of NVFP4 weights (``decode.FORMS``), ``bf16`` for BF16.
        silu_mul: whether rows are [gate | up] and the output is silu(gate) * up.
        fp32_out: FP32 output instead of BF16.
        full_blocks: whether the output width is a multiple of 128 rows: no row needs
            a bounds check.
        pdl: whether weight loads overlap the previous kernel in the stream.
        layout: of the weight.
        norm_eps: the product is of norm(x + residual), an RMSNorm with this epsilon
            (``normed``); None where it is of x.

    """

    k: int
    form: str
    silu_mul: bool = False
    fp32_out: bool = False
    full_blocks: bool = True
    pdl: bool = True
    layout: Layout = "row_major"
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.layout == "fragments" and (self.form != "mul" or not self.full_blocks):
            raise ValueError("fragments need form 'mul' and full blocks of rows")

    @property
    def is_bf16(self) -> bool:
        return self.form == "bf16"

    @property
    def lane_k(self) -> int:
        """Width of K that one lane has of a row in one step."""
        return 8 if self.is_bf16 else 32

    @property
    def step_k(self) -> int:
        """Width of K that one warp takes in one step: four lanes a row."""
        return 4 * self.lane_k

    @property
    def unit_k(self) -> int:
        """Width of K that a thread stages of x at a time."""
        return 16 if self.layout == "fragments" else 8

    @property
    def parts(self) -> int:
        """Weight rows for one output."""
        return 2 if self.silu_mul else 1


@dataclass(frozen=True)
class GemvConfig:
    """The schedule of one CTA.

    Attributes:
        nt: tiles of 8 tokens.
        row_warps: warps along the weight rows.
        row_tiles: 16-row tiles of a warp.
        k_warps: warps along K.
        k_ctas: CTAs along K, one cluster.
        depth: steps of weights that a warp keeps in flight.
        early: of these, steps decoded before the grid-dependency wait.
        min_ctas: CTAs an SM must be able to hold (caps registers), 0 for no cap.

    """

    nt: int
    row_warps: int
    row_tiles: int
    k_warps: int
    k_ctas: int
    depth: int
    early: int = 0
    min_ctas: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    @property
    def row_blocks(self) -> int:
        """16-row tiles of a CTA."""
        return self.row_warps * self.row_tiles

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return MMA_ROWS * self.row_blocks

    @property
    def tokens(self) -> int:
        return MMA_TOKENS * self.nt

    def steps(self, spec: GemvSpec) -> int:
        """Steps of one warp, the last ones past K where K does not divide."""
        return -(-spec.k // (spec.step_k * self.k_warps * self.k_ctas))

    def cta_k(self, spec: GemvSpec) -> int:
        """Width of K that one CTA covers."""
        return self.steps(spec) * spec.step_k * self.k_warps

    def grid_rows(self, n: int, spec: GemvSpec) -> int:
        """CTAs along the rows of an [n, k] weight."""
        rows = self.rows // spec.parts
        return -(-(n // spec.parts) // SCALE_ROWS) * (SCALE_ROWS // rows)

    def staged_units(self, spec: GemvSpec) -> int:
        """How many times ``spec.unit_k`` values of x each thread stages."""
        return -(-self.tokens * self.cta_k(spec) // (spec.unit_k * self.threads))

    def x_stride(self, spec: GemvSpec) -> int:
        """Bytes between two tokens of staged x: bank-conflict free reads."""
        return 2 * self.cta_k(spec) + 64

    @property
    def partial_stride(self) -> int:
        """FP32 values between two tokens of partial sums, conflict free."""
        return self.rows + 4

    @property
    def partial_over_x(self) -> bool:
        """Whether partial sums take the place of x, which is large at many tokens."""
        return self.nt >= 8

    @property
    def partial_bytes(self) -> int:
        return 4 * self.k_warps * self.tokens * self.partial_stride

    def staged_bytes(self, spec: GemvSpec) -> int:
        """What x takes, with the partial sums where these take its place."""
        x = self.tokens * self.x_stride(spec)
        return max(x, self.partial_bytes) if self.partial_over_x else x

    def shared_bytes(self, spec: GemvSpec) -> int:
        partial = 0 if self.partial_over_x else self.partial_bytes
        exchange = 4 * self.tokens * self.rows + 16 if self.k_ctas > 1 else 0
        # At most one FP32 square sum for 4 units of 8 from every CTA of the cluster.
        squares = self.tokens * self.cta_k(spec) * self.k_ctas // 8 + 16
        normed = 0 if spec.norm_eps is None else squares
        return self.staged_bytes(spec) + partial + exchange + normed

    def why_not(self, spec: GemvSpec) -> str | None:
        """Why this schedule cannot compute ``spec``, or None."""
        if self.threads > 1024:
            return f"{self.threads} threads are more than a CTA has"
        if SCALE_ROWS * spec.parts % self.rows:
            return f"{self.rows} rows do not divide {SCALE_ROWS * spec.parts}"
        if self.row_blocks % spec.parts:
            return "gate and up need an even number of 16-row tiles"
        if self.rows // (4 * spec.parts) % self.k_ctas:
            return f"{self.k_ctas} CTAs cannot share {self.rows} rows"
        if self.k_ctas not in (1, 2, 4, 8):
            return f"a cluster of {self.k_ctas} is not supported"
        if self.early > self.depth:
            return "more steps decoded early than are in flight"
        if self.depth > self.steps(spec):
            return "more steps in flight than there are"
        if (self.k_ctas - 1) * self.cta_k(spec) >= spec.k:
            return "K is too small for this split"
        held = self.staged_units(spec) * spec.unit_k
        if spec.norm_eps is not None and held > _MAX_NORMED_VALUES:
            return f"{held} values of x are more than a thread can hold"
        if self.shared_bytes(spec) > _MAX_SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory"
        return None
