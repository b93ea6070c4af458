# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""How kernels are timed: a CUDA graph of many launches on rotated weights."""

import statistics
from collections.abc import Callable

import torch

REPLAYS = 15


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times[2:]) / 1e9


def graph_us(launches: list[Callable[[], object]], at_least: int = 24) -> float:
    """Median microseconds of one launch.

    Args:
        launches: callables, one for each copy of the weight, run in rotation.
        at_least: launches in the graph.
    """
    rounds = -(-at_least // len(launches))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times = []
    for i in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / (rounds * len(launches))
