# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory in which clusters that share a request meet.

Launches that may run at the same time need a workspace each; launches in one stream,
or in one graph, share one. So an engine makes its own and gives it to all its layers,
whatever other engines of the process do. Callers that give none share one for each
device and stream.
"""

import torch

from .config import (
    GROUP,
    RECORD,
    DecodeConfig,
    grid_clusters,
    pick_config,
    split_target,
)


class DecodeWorkspace:
    """Partial results and counters for batches of limited size.

    The counters are 0 between launches: the last cluster of a request resets its own.
    """

    def __init__(
        self, max_batch: int, kv_heads: int, sms: int, device: torch.device
    ) -> None:
        """Allocate, once; nothing is allocated by a launch.

        Args:
            max_batch: Requests of the largest batch.
            kv_heads: KV heads on this rank.
            sms: SMs of the GPU.
            device: Where.

        """
        self.max_batch = max_batch
        self.kv_heads = kv_heads
        clusters = max(
            grid_clusters(batch, split_target(config, kv_heads, sms))
            for batch, config in _largest_batches(max_batch, kv_heads, sms)
        )
        self.records = torch.empty(
            (clusters, kv_heads, GROUP, RECORD), dtype=torch.float32, device=device
        )
        self.counters = torch.zeros(
            max_batch * kv_heads * GROUP, dtype=torch.int32, device=device
        )

    def why_not(self, batch: int, kv_heads: int, device: torch.device) -> str | None:
        """Why a launch cannot use this workspace, or None."""
        if kv_heads != self.kv_heads:
            return f"it is for {self.kv_heads} KV heads, not {kv_heads}"
        if batch > self.max_batch:
            return f"it is for at most {self.max_batch} requests, not {batch}"
        if device != self.records.device:
            return f"it is on {self.records.device}, not {device}"
        return None


def _largest_batches(
    max_batch: int, kv_heads: int, sms: int
) -> list[tuple[int, DecodeConfig]]:
    """The largest batch of each schedule."""
    largest: dict[DecodeConfig, int] = {}
    for batch in range(1, max_batch + 1):
        for windowed in (False, True):
            largest[pick_config(batch, kv_heads, sms, windowed)] = batch
    return [(batch, config) for config, batch in largest.items()]
