# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""How kernels are timed: a CUDA graph of many launches on rotated weights."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Timed:
    """A CUDA graph of so many launches."""

    graph: torch.cuda.CUDAGraph
    launches: int


def graph_us(launches: list[Callable[[], object]], at_least: int = 24) -> float:
    """Median microseconds of one launch; see `capture`."""
    return us_in_turn([capture(launches, at_least)])[0]


def capture(launches: list[Callable[[], object]], at_least: int = 24) -> Timed:
    """Captures launches, after each has run once.

    Args:
        launches: callables, one for each copy of the weight, run in rotation.
        at_least: launches in the graph.
    """
    rounds = -(-at_least // len(launches))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return Timed(graph, rounds * len(launches))


def us_in_turn(graphs: list[Timed]) -> list[float]:
    """Median microseconds of a launch of each graph.

    They are replayed in turn, so that clocks and temperature are the same for all.
    """
    times: list[list[float]] = [[] for _ in graphs]
    for i in range(REPLAYS + 3):
        for timed, own in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            timed.graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                own.append(start.elapsed_time(end))
    return [
        1e3 * statistics.median(own) / timed.launches
        for timed, own in zip(graphs, times, strict=True)
    ]
