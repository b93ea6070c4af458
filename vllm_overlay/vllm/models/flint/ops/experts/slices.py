# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One warp's product: 16-row tiles of a weight, a slice of K, up to 8 tokens.

The warp stages its own slice of x, so that nothing but the sum over the slices needs
other warps. Weight loads are issued apart from what uses them.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ..gemv.activations import FragmentActivations, StagedActivations
from ..gemv.config import GemvConfig, GemvSpec
from ..gemv.fragments import FragmentWeight
from ..gemv.weights import ContiguousRowsWeight, RowMajorWeight


class Operand(NamedTuple):
    """One or all experts' weight: words, scales, global scale; BF16 has the first."""

    words: cute.Tensor
    scales: cute.Tensor | None
    factor: cute.Tensor | None

    def expert(self, index) -> "Operand":
        """One expert's, of all; its global scale is still among all."""
        scales = None if self.scales is None else _expert(self.scales, index)
        return Operand(_expert(self.words, index), scales, self.factor)


class WarpSlice:
    """Parts of the GEMV for one warp; see ``spec.slice_config``."""

    def __init__(
        self,
        spec: GemvSpec,
        config: GemvConfig,
        one_token: bool,
        contiguous: bool = False,
    ):
        self.spec = spec
        self.config = config
        self.steps = config.steps(spec)
        self.weight: FragmentWeight | RowMajorWeight
        self.activations: StagedActivations
        if spec.layout == "fragments":
            self.weight = FragmentWeight(spec, config)
            self.activations = FragmentActivations(spec, config, one_token)
        else:
            rows = ContiguousRowsWeight if contiguous else RowMajorWeight
            self.weight = rows(spec, config)
            self.activations = StagedActivations(spec, config, one_token)
        self.copies = range(self.activations.copies)
        self.staged_words = self.activations.tokens * config.x_stride(spec) // 4

    def staged(self, s_words: cute.Pointer) -> cute.Tensor:
        """X as staged at ``s_words``, memory of this warp."""
        return cute.make_tensor(s_words, self.activations.layout())

    def load_weights(self, weight: Operand, tile, lane, rank):
        """Issues the first loads of slice ``rank``: step to words."""
        return {
            s: self._load(weight, tile, lane, rank, s) for s in range(self.config.depth)
        }

    def load_x(self, m_x, rows, count, lane, rank):
        """Issues the loads of x; see ``StagedActivations.load``."""
        return self.activations.load(m_x, rows, count, rank, lane, self.copies)

    def store_x(self, s_x, held, lane):
        """Stages what ``load_x`` returned, for this warp."""
        self.activations.store(s_x, held, lane, self.copies)
        cute.arch.sync_warp()

    def multiply(self, loaded, weight: Operand, s_x, tile, lane, rank):
        """Products of the slice: ``[row tile][0]`` is four sums of the mma."""
        acc = [[[Float32(0.0)] * 4] for _ in range(self.config.row_tiles)]
        for s in range(self.steps):
            fragments = self.weight.decode_step(loaded.pop(s), lane)
            ahead = s + self.config.depth
            if ahead < self.steps:
                loaded[ahead] = self._load(weight, tile, lane, rank, ahead)
            self.activations.multiply(acc, fragments, s_x, lane, s)
        return acc

    def _load(self, weight: Operand, tile, lane, rank, step):
        return self.weight.load_step(
            weight.words, weight.scales, tile, 0, lane, rank * self.steps + step
        )

    def factor(self, weight: Operand, index) -> Float32:
        """What the sums are multiplied by; ``index`` is the expert's, or 0."""
        if weight.factor is None:
            return Float32(1.0)
        return weight.factor[index] * self.weight.output_scale


def _expert(tensor: cute.Tensor, index) -> cute.Tensor:
    return cute.slice_(tensor, (index, *[None] * (cute.rank(tensor) - 1)))
