# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One warp's product: 16-row tiles of a weight, a slice of K, up to 8 tokens.

The warp stages its own slice of x, so that nothing but the sum over the slices needs
other warps. Weight loads are issued apart from what uses them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from ..gemv.activations import FragmentActivations, StagedActivations
from ..gemv.config import GemvConfig, GemvSpec
from ..gemv.fragments import FragmentWeight
from ..gemv.weights import ContiguousRowsWeight, RowMajorWeight


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
        """x as staged at ``s_words``, memory of this warp."""
        return cute.make_tensor(s_words, self.activations.layout())

    def load_weights(self, m_w, m_sf, tile, lane, rank):
        """Issues the first loads of slice ``rank``: step to words."""
        return {
            s: self._load(m_w, m_sf, tile, lane, rank, s)
            for s in range(self.config.depth)
        }

    def load_x(self, m_x, rows, count, lane, rank):
        """Issues the loads of x; see ``StagedActivations.load``."""
        return self.activations.load(m_x, rows, count, rank, lane, self.copies)

    def store_x(self, s_x, held, lane):
        """Stages what ``load_x`` returned, for this warp."""
        self.activations.store(s_x, held, lane, self.copies)
        cute.arch.sync_warp()

    def multiply(self, loaded, m_w, m_sf, s_x, tile, lane, rank):
        """Products of the slice: ``[row tile][0]`` is four sums of the mma."""
        acc = [[[Float32(0.0)] * 4] for _ in range(self.config.row_tiles)]
        for s in range(self.steps):
            fragments = self.weight.decode_step(loaded.pop(s), lane)
            ahead = s + self.config.depth
            if ahead < self.steps:
                loaded[ahead] = self._load(m_w, m_sf, tile, lane, rank, ahead)
            self.activations.multiply(acc, fragments, s_x, lane, s)
        return acc

    def _load(self, m_w, m_sf, tile, lane, rank, step):
        return self.weight.load_step(
            m_w, m_sf, tile, 0, lane, rank * self.steps + step
        )


def expert_slice(m_w: cute.Tensor, expert) -> cute.Tensor:
    """One expert's part of a tensor of all of them."""
    return cute.slice_(m_w, (expert, *[None] * (cute.rank(m_w) - 1)))
