# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a server has in use: requests, KV cache, memory of its processes and GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from quickstart.server import group_members

_SETTLE_S = 30.0
_POLL_S = 0.5
_MIB = 2**20
_RESIDENT = "process_resident_memory_bytes"
_LOCAL = ("127.0.0.1", "localhost", "::1")


class WatchError(RuntimeError):
    """The server does not say what it has in use."""


@dataclass(frozen=True)
class Reading:
    """What was in use at one time.

    Attributes:
        running: Requests that the engine works on.
        waiting: Requests that wait for it.
        kv_cache: Share of the KV cache's pages that requests hold.
        host_mib: Memory of the server's processes; None where it is not known.
        gpu_mib: Memory of the server's processes on this machine's GPUs, or of all
            processes if its own are not known; None where that is not known either.
    """

    running: int
    waiting: int
    kv_cache: float
    host_mib: float | None
    gpu_mib: float | None

    @property
    def idle(self) -> bool:
        """Whether no request holds anything."""
        return not (self.running or self.waiting or self.kv_cache)


class Watch:
    """Reads what a server has in use.

    Args:
        url: Base of its addresses.
        group: Its process group; None for a server that was there already.
    """

    def __init__(self, url: str, group: int | None) -> None:
        self._url = url
        self._group = group
        self._on_this_machine = urlsplit(url).hostname in _LOCAL

    def read(self) -> Reading:
        """Reads it once.

        Raises:
            WatchError: If /metrics does not have it.
        """
        values = self._metrics()
        own = set() if self._group is None else set(group_members(self._group))
        try:
            return Reading(
                int(values["vllm:num_requests_running"]),
                int(values["vllm:num_requests_waiting"]),
                values["vllm:kv_cache_usage_perc"],
                self._host_mib(values, own),
                _gpu_mib(own) if self._on_this_machine else None,
            )
        except KeyError as error:
            raise WatchError(f"{self._url}/metrics has no {error}") from None

    def settle(self) -> Reading:
        """Reads until the server is idle, or for half a minute."""
        end = time.monotonic() + _SETTLE_S
        while not (reading := self.read()).idle and time.monotonic() < end:
            time.sleep(_POLL_S)
        return reading

    def gpus(self) -> list[str]:
        """Names of this machine's GPUs, if the server is on it."""
        if not self._on_this_machine:
            return []
        return [name for (name,) in _nvidia_smi("gpu=name")]

    def _metrics(self) -> dict[str, float]:
        """Values by name, added up over engines."""
        # Without a proxy: the server is near, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except OSError as error:
            raise WatchError(f"{self._url}/metrics: {error}") from None
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def _host_mib(self, values: dict[str, float], own: set[int]) -> float | None:
        if self._group is not None:
            return sum(map(_resident_mib, own))
        return values[_RESIDENT] / _MIB if _RESIDENT in values else None


def _resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it has just ended
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def _nvidia_smi(query: str) -> list[list[str]]:
    """The rows of a query; none where there is no such program, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    return [line.split(", ") for line in done.stdout.splitlines()]


def _gpu_mib(processes: set[int]) -> float | None:
    """Of these processes, or of all where none of them is listed."""
    # In a container they may have other numbers, or memory that is not known.
    listed = _nvidia_smi("compute-apps=pid,used_memory") if processes else []
    used = [mib for pid, mib in listed if int(pid) in processes and mib.isdigit()]
    used = used or [mib for (mib,) in _nvidia_smi("gpu=memory.used")]
    return sum(map(float, used)) if used else None
