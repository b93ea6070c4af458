# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Kernels kept on disk, with a stand-in for quack's cache."""

import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.gemv import disk_cache, variants


class Disk:
    """Stands in for quack's cache: what was compiled outlives the process."""

    def __init__(self) -> None:
        self.kept: dict[tuple, object] = {}
        self.full = False
        self.CACHE_ENABLED = True
        self.CACHE_DIR: str | None = None

    def jit_cache(self, compiler: Callable) -> Callable:
        def look_up(*key: object) -> object:
            if self.full:
                raise OSError(28, "No space left on device")
            place = (compiler.__qualname__, *key)
            if place not in self.kept:
                self.kept[place] = compiler(*key)
            return self.kept[place]

        return look_up


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(cache=disk))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        disk_cache.importlib.util,
        "find_spec",
        lambda name: object() if name == "quack" else find_spec(name),
    )
    restart(monkeypatch, (9, 0))
    return disk


def restart(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """What a new process on such a GPU starts with."""
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    monkeypatch.setattr(disk_cache, "current_gpu", lambda: Gpu(capability, 132))
    monkeypatch.setattr(variants, "_compiled", {})
    monkeypatch.setattr(variants, "_seconds", {})
    monkeypatch.setattr(variants, "_from_disk", set())
    disk_cache.on_disk.cache_clear()
    variants._timed.cache_clear()


def compiled(*key: object) -> str:
    return f"kernel {key}"


def get(*key: object) -> object:
    return variants.variant(key, lambda: compiled)


def test_second_start_compiles_nothing(disk: Disk, monkeypatch) -> None:
    first = get(2048, "mul")
    assert list(variants._seconds) == [(2048, "mul")]
    restart(monkeypatch, (9, 0))
    assert get(2048, "mul") is first
    assert not variants._seconds
    assert variants._from_disk == {(2048, "mul")}


def test_other_gpus_and_other_sources_have_kernels_of_their_own(
    disk: Disk, monkeypatch
) -> None:
    get(2048, "mul")
    restart(monkeypatch, (10, 0))
    get(2048, "mul")
    assert len(disk.kept) == 2
    restart(monkeypatch, (10, 0))
    monkeypatch.setattr(disk_cache, "_sources", lambda: "changed")
    get(2048, "mul")
    assert len(disk.kept) == 3


def test_full_disk_is_no_error(disk: Disk, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        disk_cache.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    disk.full = True
    get(2048, "mul")
    assert list(variants._seconds) == [(2048, "mul")]
    assert len(said) == 1 and "No space left on device" in said[0]
    assert not disk.CACHE_ENABLED, "quack's own GEMMs would fail on it next"


def test_folder_is_vllms_unless_another_is_asked_for(disk: Disk, monkeypatch) -> None:
    get(2048, "mul")
    assert disk.CACHE_DIR is not None and disk.CACHE_DIR.endswith("quack_cache")
    restart(monkeypatch, (9, 0))
    disk.CACHE_DIR = "elsewhere"
    get(2048, "mul")
    assert disk.CACHE_DIR == "elsewhere"


def test_without_quack_every_start_compiles(monkeypatch) -> None:
    monkeypatch.setattr(disk_cache.importlib.util, "find_spec", lambda name: None)
    restart(monkeypatch, (9, 0))
    get(2048, "mul")
    assert list(variants._seconds) == [(2048, "mul")]
