# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a decode-attention variant computes and how, and which one a batch gets."""

from dataclasses import dataclass

# The window of a layer that sees all keys: longer than any context.
NO_WINDOW = 2**31 - 1
HEAD_DIM = 128
# Query heads of a KV head: the columns of one mma.sync.m16n8k16.
GROUP = 8
# Keys that a warp takes at once; pages hold a multiple of it.
TILE_KEYS = 16
# One head's partial result: output, running maximum, sum, and two to align.
RECORD = HEAD_DIM + 4
MAX_AT = HEAD_DIM
SUM_AT = HEAD_DIM + 1
# Warps that an SM holds at the kernels' register count.
_SM_WARPS = 8
_MAX_CLUSTER = 8


@dataclass(frozen=True)
class DecodeSpec:
    """The function: everything of a problem that is fixed at compile time.

    Attributes:
        fp8: E4M3 cache with per-tensor scales, instead of BF16.
        pdl: whether launching overlaps the previous kernel in the stream.
        early_reads: whether lengths, block tables and all but each request's last key
            may be read before the previous kernel has ended.

    """

    fp8: bool = False
    pdl: bool = True
    early_reads: bool = False

    @property
    def element_bytes(self) -> int:
        return 1 if self.fp8 else 2

    @property
    def lane_dims(self) -> int:
        """Channels in one 16-byte load."""
        return 16 // self.element_bytes


@dataclass(frozen=True)
class DecodeConfig:
    """The schedule of one CTA.

    Attributes:
        warps: warps of a CTA, each with keys of its own.
        cluster: CTAs that share a run of keys and merge it in shared memory.
        tiles: 16-key tiles that a warp has in flight.

    """

    warps: int = 4
    cluster: int = 1
    tiles: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def step_warps(self) -> int:
        """Warps that share a run of keys."""
        return self.warps * self.cluster

    @property
    def round_tiles(self) -> int:
        """Tiles that a cluster takes at once."""
        return self.step_warps * self.tiles

    @property
    def rank_heads(self) -> int:
        """Query heads that one CTA of a cluster finishes."""
        return GROUP // self.cluster

    def why_not(self) -> str | None:
        """Why this schedule cannot run, or None."""
        if self.cluster not in (1, 2, 4, 8):
            return f"a cluster of {self.cluster} is not supported"
        if not 1 <= self.warps <= 16:
            return f"{self.warps} warps are not supported"
        if self.tiles not in (1, 2):
            return f"{self.tiles} tiles in flight are not supported"
        return None


def pick_config(batch: int, kv_heads: int, sms: int, windowed: bool) -> DecodeConfig:
    """The schedule for a batch, whose lengths the host does not know.

    A window bounds the work of few requests, so large clusters take it, which merge
    without global memory. All keys of a long context are read fastest by pairs of CTAs:
    on an H200 at 100K keys a batch of 1 takes 54 us with them and 79 with clusters of
    8, which win 1.2 us at 1K. Larger batches fill the GPU without clusters: at 8
    requests of 1K, 6.0 us in a window (8.8 with clusters of 8) and 8.8 us without (9.6
    in pairs).

    Args:
        batch: requests.
        kv_heads: KV heads on this rank.
        sms: SMs of the GPU.
        windowed: whether a query sees a window of keys only.

    """
    few = batch * kv_heads * _MAX_CLUSTER <= sms
    if windowed:
        return DecodeConfig(cluster=_MAX_CLUSTER if few else 1)
    if batch * kv_heads > sms:
        return DecodeConfig()
    return DecodeConfig(warps=_SM_WARPS, cluster=2 if few else 1)


def split_target(config: DecodeConfig, kv_heads: int, sms: int) -> int:
    """How many clusters a KV head should get over all requests."""
    return max(1, _resident_ctas(config.warps, sms) // (config.cluster * kv_heads))


def grid_clusters(batch: int, target: int) -> int:
    """Clusters to launch for a KV head: enough for any lengths.

    Rounding adds less than one cluster a request, so those with nothing to do are at
    most ``batch``.
    """
    return target + batch


def _resident_ctas(warps: int, sms: int) -> int:
    return sms * max(1, _SM_WARPS // warps)
