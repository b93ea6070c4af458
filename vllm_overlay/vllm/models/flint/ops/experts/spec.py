# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the expert GEMVs compute (``GateUpSpec``, ``DownSpec``), and how."""

from dataclasses import dataclass, replace

from ..gemv.config import MMA_ROWS, MMA_TOKENS, SCALE_ROWS, GemvConfig, GemvSpec

# Up to how many tokens a variant of the first kernel serves: one token needs no search
# for the pairs of an expert, and few need a short one.
TOKEN_CASES = (1, 8, 32, 64)
MAX_TOKENS = TOKEN_CASES[-1]
# The same of the second kernel.
DOWN_CASES = (1, 16, MAX_TOKENS)
_LANES = 32
_MAX_WARPS = 32
_MAX_SHARED_BYTES = 227 * 1024
# Steps whose BF16 weights fit a thread's registers.
_BF16_DEPTH = 8


@dataclass(frozen=True)
class GateUpSpec:
    """The first kernel: everything of it that is fixed at compile time.

    Attributes:
        top_k: experts of a token.
        width: of an expert's activations.
        routed: one expert's [gate | up].
        shared: the shared expert's [gate | up]; None where there is none.
        shared_width: of the shared expert's activations.
        max_tokens: one of ``TOKEN_CASES``.

    """

    top_k: int
    width: int
    routed: GemvSpec
    shared: GemvSpec | None
    shared_width: int
    max_tokens: int

    @property
    def one_token(self) -> bool:
        return self.max_tokens == 1

    @property
    def id_words(self) -> int:
        """Ids of all pairs, 32 at a time."""
        return -(-self.max_tokens * self.top_k // _LANES)


@dataclass(frozen=True)
class DownSpec:
    """The second kernel: everything of it that is fixed at compile time.

    Attributes:
        top_k: experts of a token.
        width: of the output.
        routed: one expert's down projection.
        shared: the shared expert's; None where there is none.

    """

    top_k: int
    width: int
    routed: GemvSpec
    shared: GemvSpec | None

    @property
    def contiguous(self) -> bool:
        """Whether a CTA's rows are neighbours, as those of fragments are."""
        return self.shared is not None and self.shared.layout == "fragments"


def slice_config(spec: GemvSpec, row_tiles: int, warps: int, depth: int) -> GemvConfig:
    """Schedule of one warp that takes one of ``warps`` slices of K.

    To the GEMV's parts such a warp is a CTA, and the slices are a cluster's.
    """
    shape = GemvConfig(1, 1, row_tiles * spec.parts, 1, warps, depth=1)
    return replace(shape, depth=min(depth, shape.steps(spec)))


@dataclass(frozen=True)
class GateUpConfig:
    """Schedule of a CTA that has some rows of gate and up of one expert.

    Attributes:
        row_tiles: 16-row tiles of gate, and as many of up.
        k_warps: warps along K.
        depth: steps of weights that a warp keeps in flight.
        min_ctas: CTAs an SM must be able to hold (caps registers), 0 for no cap.

    """

    row_tiles: int = 1
    k_warps: int = 8
    depth: int = 4
    min_ctas: int = 0

    @property
    def threads(self) -> int:
        return _LANES * self.k_warps

    @property
    def rows(self) -> int:
        """Rows of the output of a CTA."""
        return MMA_ROWS * self.row_tiles

    def cta(self, spec: GemvSpec) -> GemvConfig:
        """The whole CTA, whose warps' sums are added."""
        return GemvConfig(1, 1, self.row_tiles * spec.parts, self.k_warps, 1, 1)

    def slice(self, spec: GemvSpec) -> GemvConfig:
        """One warp."""
        return slice_config(spec, self.row_tiles, self.k_warps, self.depth)

    def shared_bytes(self, spec: GateUpSpec) -> int:
        tokens = 1 if spec.one_token else MMA_TOKENS
        parts = [part for part in (spec.routed, spec.shared) if part is not None]
        staged = max(self.slice(part).x_stride(part) for part in parts) * tokens
        rows = 4 * 2 * MMA_TOKENS
        return self.k_warps * (staged + rows) + self.cta(spec.routed).partial_bytes

    def why_not(self, spec: GateUpSpec) -> str | None:
        """Why this schedule cannot compute ``spec``, or None."""
        if spec.max_tokens not in TOKEN_CASES:
            return f"{spec.max_tokens} tokens are none of {TOKEN_CASES}"
        for part, width in (
            (spec.routed, spec.width),
            (spec.shared, spec.shared_width),
        ):
            if part is not None and (reason := _why_no_part(part, width)) is not None:
                return reason
        if SCALE_ROWS % self.rows:
            return f"{self.rows} rows do not divide {SCALE_ROWS}"
        if self.k_warps > _MAX_WARPS:
            return f"{self.k_warps} warps are more than a CTA has"
        if self.shared_bytes(spec) > _MAX_SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory"
        return None


@dataclass(frozen=True)
class DownConfig:
    """Schedule of a CTA that has some rows of the output of a few tokens.

    Attributes:
        row_tiles: 16-row tiles of each warp.
        tokens: tokens of a CTA: each has warps of its own for its experts, and the
            shared expert's warps serve all.
        expert_warps: warps along K of each expert.
        shared_warps: warps along K of the shared expert.
        depth: steps of weights that a warp keeps in flight.
        min_ctas: CTAs an SM must be able to hold (caps registers), 0 for no cap.

    """

    row_tiles: int = 1
    tokens: int = 1
    expert_warps: int = 1
    shared_warps: int = 2
    depth: int = 4
    min_ctas: int = 0

    @property
    def rows(self) -> int:
        """Rows of the output of a CTA."""
        return MMA_ROWS * self.row_tiles

    def routed_warps(self, spec: DownSpec) -> int:
        return self.tokens * self.expert_warps * spec.top_k

    def warps(self, spec: DownSpec) -> int:
        shared = 0 if spec.shared is None else self.shared_warps
        return self.routed_warps(spec) + shared

    def slice(self, spec: GemvSpec, warps: int) -> GemvConfig:
        """One warp of an expert that has ``warps`` of them."""
        return slice_config(spec, self.row_tiles, warps, self.depth)

    def shared_bytes(self, spec: DownSpec) -> int:
        routed = self.slice(spec.routed, self.expert_warps).x_stride(spec.routed)
        count = self.routed_warps(spec)
        total = count * routed
        if spec.shared is not None:
            shared = self.slice(spec.shared, self.shared_warps).x_stride(spec.shared)
            staged = 1 if self.tokens == 1 else MMA_TOKENS
            total += self.shared_warps * staged * shared
            count += self.shared_warps * self.tokens
        return total + 4 * self.rows * count + 8 * self.warps(spec)

    def why_not(self, spec: DownSpec) -> str | None:
        """Why this schedule cannot compute ``spec``, or None."""
        for part in (spec.routed, spec.shared):
            if part is not None:
                reason = _why_no_part(part, spec.width)
                if reason is not None:
                    return reason
        if SCALE_ROWS % self.rows:
            return f"{self.rows} rows do not divide {SCALE_ROWS}"
        if not 1 <= self.tokens <= MMA_TOKENS:
            return f"{self.tokens} tokens are not 1 to {MMA_TOKENS}"
        if self.tokens * self.rows > _LANES * self.warps(spec):
            return f"{self.tokens} x {self.rows} outputs are more than its threads"
        if self.warps(spec) > _MAX_WARPS:
            return f"{self.warps(spec)} warps are more than a CTA has"
        if self.shared_bytes(spec) > _MAX_SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory"
        return None


def _why_no_part(spec: GemvSpec, width: int) -> str | None:
    if width == 0 or width % SCALE_ROWS:
        return f"an output of {width} rows is no multiple of {SCALE_ROWS}"
    if spec.k == 0 or spec.k % SCALE_ROWS:
        return f"an input of {spec.k} is no multiple of {SCALE_ROWS}"
    return None


def gate_up_config(spec: GateUpSpec) -> GateUpConfig:
    """The schedule of the first kernel, as measured on an H200.

    One token's work is cut as finely as it can be. More tokens share what they stage
    of x with more rows, and many want small CTAs, most of which have no work; packed
    codes leave them registers for more loads in flight. A cap on registers gains one
    token 0.2 us more, but does not compile without a GPU.
    BF16 rows are four times as long, so a warp has more of one in flight.
    """
    if spec.routed.is_bf16:
        return GateUpConfig(1, _warps(spec.routed, 8), _BF16_DEPTH)
    if spec.one_token:
        return GateUpConfig(1, _warps(spec.routed, 16), 1)
    if spec.max_tokens <= 8:
        return GateUpConfig(2, _warps(spec.routed, 8), 1)
    depth = 2 if spec.routed.form == "packed" else 1
    return GateUpConfig(2, _warps(spec.routed, 4), depth)


def down_config(spec: DownSpec, most: int) -> DownConfig:
    """The schedule of the second kernel for up to ``most`` tokens (``DOWN_CASES``).

    As measured on an H200. One token has 128 CTAs, so each is cut into more warps. More
    tokens share what is decoded of the shared expert, and many also what is staged of
    x among more rows; other forms than packed codes lack the registers for that.
    """
    if spec.routed.is_bf16:
        warps, depth = _warps(spec.routed, 1), _BF16_DEPTH
        return DownConfig(1, 1, warps, _shared_warps(spec, warps), depth)
    if most == 1:
        warps = _warps(spec.routed, 2)
        return DownConfig(1, 1, warps, _shared_warps(spec, warps), 1)
    many = most > DOWN_CASES[1] and spec.routed.form == "packed"
    rows, tokens = (2, 4) if many else (1, 2)
    if spec.shared is None:
        tokens = 1
    return DownConfig(rows, tokens, 1, _shared_warps(spec, 2), 2)


def _shared_warps(spec: DownSpec, warps: int) -> int:
    """Warps of the shared expert, for so many of a routed one's width."""
    if spec.shared is None:
        return 1
    wanted = max(1, min(8, warps * spec.shared.k // spec.routed.k))
    return _warps(spec.shared, wanted)


def _warps(spec: GemvSpec, most: int) -> int:
    """Warps along K, each of which has a step at least."""
    steps = max(1, spec.k // spec.step_k)
    return max(w for w in (1, 2, 4, 8, 16) if w <= min(most, steps))
