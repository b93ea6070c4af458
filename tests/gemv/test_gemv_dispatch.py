# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What is chosen and refused, and why, without a GPU."""

import itertools
import json
import sys
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel
from vllm.models.flint.ops import fragments, linear, nvfp4_gemv
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.gemv import tables, variants
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec
from vllm.platforms import PlatformEnum

from gemvbench import sets, table

KERNEL = linear.FlintNvFp4LinearKernel


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu((9, 0), 132))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (variants, registry.nvfp4.flint_gemv):
        monkeypatch.setattr(module, "missing_compiler", lambda: None)


def test_reasons(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    assert KERNEL.is_supported(90) == (True, None)
    assert KERNEL.is_supported(120) == (True, None)
    assert "requires sm_90" in (KERNEL.is_supported(80)[1] or "")
    # The partner there is FlashInfer's, which no CPU machine has.
    assert "FlashInfer" in (KERNEL.is_supported(100)[1] or "")
    monkeypatch.setattr(
        registry.nvfp4.flint_gemv, "missing_compiler", lambda: "too old"
    )
    assert "too old" in (KERNEL.is_supported(90)[1] or "")


def test_other_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variants.missing_compiler.cache_clear()
    monkeypatch.setattr(variants.importlib.metadata, "version", lambda name: "4.9.1")
    try:
        assert "4.8 is needed, found 4.9.1" in (variants.missing_compiler() or "")
    finally:
        variants.missing_compiler.cache_clear()


def test_disabled_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = registry._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    monkeypatch.setattr(registry, "_POSSIBLE_NVFP4_KERNELS", {None: cuda})
    monkeypatch.setattr(registry, "_get_linear_backend", lambda quantization: "flint")
    monkeypatch.setattr(registry.current_platform, "_enum", None, raising=False)
    with pytest.raises(ValueError, match="FlintNvFp4LinearKernel: .* requires CUDA"):
        init_nvfp4_linear_kernel(use_a16=True)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", KERNEL.__name__)
    with pytest.raises(ValueError, match="FlintNvFp4LinearKernel disabled by env"):
        init_nvfp4_linear_kernel(use_a16=True)


def test_model_without_gpu_is_left_alone() -> None:
    model = torch.nn.Module()
    assert linear.install_flint_dense_kernels(model) == 0


def test_tuned_table_fits_its_shapes(h200: None) -> None:
    entries = tables.load_table("sm90")
    assert len(entries) >= 9
    for shape, entry in entries.items():
        assert entry.schedules
        assert nvfp4_gemv.tuned(*astuple(shape)) == (entry.max_tokens > 0)
    for spec, config in sets.served("sm90", "mul") + sets.tested("sm90", "mul"):
        if isinstance(config, GemvConfig):
            assert config.why_not(spec) is None


@pytest.mark.parametrize("k", [32, 64, 128, 2048, 4096, 6144, 16384])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_every_shape_has_a_schedule(k: int, silu_mul: bool) -> None:
    """Small N, which no cluster fills, and K too long for one CTA's shared memory."""
    spec = GemvSpec(k, "mul", silu_mul=silu_mul)
    tiles = tables.token_tiles(spec, None)
    assert tiles == ((1, 2, 4) if k == 16384 else (1, 2, 4, 8))
    for n, nt in itertools.product((16, 256, 2048, 12288), tiles):
        config = tables.default_config(spec, n, nt, 132)
        assert config.why_not(spec) is None


def test_pick_nt(h200: None) -> None:
    assert nvfp4_gemv.pick_nt(5120, 2048, 1) == 1
    assert nvfp4_gemv.pick_nt(5120, 2048, 8) == 1
    assert nvfp4_gemv.pick_nt(5120, 2048, 0) is None
    assert nvfp4_gemv.pick_nt(5120, 2048, 100000) is None
    assert nvfp4_gemv.pick_nt(5121, 2048, 1) is None
    assert nvfp4_gemv.max_tokens(5121, 2048, bf16=True) == 0


@pytest.mark.parametrize(
    ("capability", "quack", "layout"),
    [
        (90, None, "fragments"),
        (90, "quack-kernels 0.6.5 is needed, found 0.7.0", "row_major"),
        (100, None, "row_major"),
        (120, None, "row_major"),
    ],
)
def test_layout_by_capability(
    monkeypatch: pytest.MonkeyPatch, capability: int, quack: str | None, layout: str
) -> None:
    """Only SM90 takes quack's layout; without quack one line says why."""
    said: list[tuple[str, ...]] = []
    module = registry.nvfp4.flint_gemv
    monkeypatch.setattr(module, "_capability", lambda: capability)
    monkeypatch.setattr(module.fragments, "missing_quack", lambda: quack)
    monkeypatch.setattr(module.logger, "warning_once", lambda *args: said.append(args))
    assert module._layout() == layout
    assert [args[1] for args in said] == ([] if quack is None else [quack])


def test_other_quack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = fragments.importlib.metadata
    fragments.missing_quack.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.0")
    try:
        assert "0.6.5 is needed, found 0.7.0" in (fragments.missing_quack() or "")
    finally:
        fragments.missing_quack.cache_clear()


@pytest.mark.parametrize(
    ("weight", "scales", "reason"),
    [
        ((1, 1, 128, 16), (1, 1, 32, 4, 2), "multiple of 128"),
        ((2, 1, 128, 8), (2, 1, 32, 4, 2), "weight must be"),
        ((2, 1, 128, 16), (2, 1, 32, 8), "weight_scale must be"),
    ],
)
def test_bad_fragments(
    h200: None, weight: tuple[int, ...], scales: tuple[int, ...], reason: str
) -> None:
    tensors = (torch.zeros(shape, dtype=torch.uint8) for shape in (weight, scales))
    with pytest.raises(ValueError, match=reason):
        nvfp4_gemv.fragment_gemv(torch.zeros(1, 64).bfloat16(), *tensors, torch.ones(1))


def test_table_of_fragments(tmp_path: Path) -> None:
    """The partner's tiles decide where the GEMV ends; other shapes are kept.

    Its own choice stays where others are hardly faster, as at 64 tokens.
    """
    shape = {"n": 128, "k": 128, "silu_mul": False, "form": "mul"}
    shape["layout"] = "fragments"
    small, large = ({"tile_m": 64, "tile_n": n, "split_k": 1} for n in (16, 64))
    rows = [
        shape | {"m": m, "us": us, "config": vars(GemvConfig(nt, 4, 1, 1, 1, 1))}
        for nt, m, us in ((1, 8, 1.0), (2, 16, 2.0), (4, 32, 4.0))
    ]
    rows += [
        shape | {"m": m, "us": us, "tiles": tiles, "partners_own": tiles == small}
        for m, tiles, us in (
            (8, small, 3.0),
            (16, small, 3.5),
            (16, large, 3.0),
            (32, small, 3.9),
            (64, large, 5.0),
            (64, small, 5.2),
        )
    ]
    path = tmp_path / "sm90.json"
    assert table.write_table({"gpu": "G", "copy_tb_s": 1.0, "rows": rows}, path) == 1
    moved = [row | {"n": 256} for row in rows]
    table.write_table({"gpu": "G", "copy_tb_s": 1.0, "rows": moved}, path)
    written = json.loads(path.read_text())["shapes"]
    assert [row["n"] for row in written] == [128, 256]
    for row in written:
        assert row["max_tokens"] == 16
        found = [(entry["m"], entry["tiles"]) for entry in row["gemm_tiles"]]
        assert found == [(8, small), (16, large), (32, small), (64, small)]
    other = {"gpu": "H", "copy_tb_s": 1.0, "rows": rows}
    with pytest.raises(ValueError, match="is of a G"):
        table.write_table(other, path)


def test_measured_tiles(monkeypatch: pytest.MonkeyPatch, h200: None) -> None:
    """The smallest measured count that covers the tokens; the last one past all."""
    tiles = {m: tables.GemmTiles(128, m, 1) for m in (16, 64, 256)}
    shape = tables.Shape(128, 64, layout="fragments")
    entry = tables.TunedShape({}, 8, tiles)
    monkeypatch.setattr(nvfp4_gemv, "load_table", lambda name: {shape: entry})
    picked = [fragments.measured_tiles(shape, m) for m in (9, 16, 17, 256, 257, 16384)]
    assert [t.tile_n for t in picked if t] == [16, 16, 64, 256, 256, 256]
    assert fragments.measured_tiles(tables.Shape(256, 64), 9) is None


def test_table_keeps_the_fastest_and_the_limit(tmp_path: Path) -> None:
    """Hand-made times: the second schedule wins, the partner does from 64 tokens on."""

    def row(m: int, us: float, **more) -> dict:
        shape = {"n": 64, "k": 128, "silu_mul": False, "form": "mul"}
        return shape | {"layout": "row_major", "m": m, "us": us} | more

    first = vars(GemvConfig(1, 4, 1, 1, 1, 1))
    second = vars(GemvConfig(1, 2, 1, 1, 1, 1))
    rows = [row(1, 1.0, config=first), row(8, 3.0, config=first)]
    rows += [row(1, 1.1, config=second), row(8, 2.0, config=second)]
    rows += [row(32, 3.0, path=table.GEMV), row(32, 4.0, path=table.PARTNER)]
    rows += [row(64, 6.0, path=table.GEMV), row(64, 5.0, path=table.PARTNER)]
    rows += [row(96, 1.0, path=table.GEMV), row(96, 5.0, path=table.PARTNER)]
    results = {"gpu": "G", "copy_tb_s": 1.0, "rows": rows}
    (entry,) = table.make_table(results)["shapes"]
    assert entry["max_tokens"] == 32
    assert [s["config"] for s in entry["schedules"]] == [second]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results | {"gpu": "other"}))
    path2 = tmp_path / "more.json"
    path2.write_text(json.dumps(results))
    with pytest.raises(ValueError, match="is from a"):
        table.read_results([path, path2])


@pytest.mark.parametrize(
    ("capability", "cuda", "form"),
    [((9, 0), 13, "mul"), ((10, 0), 13, "cvt"), ((10, 3), 12, "mul")],
)
def test_decode_form_suits_gpu_and_assembler(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: int, form: str
) -> None:
    version = SimpleNamespace(CUDA_VERSION=SimpleNamespace(major=cuda))
    monkeypatch.setitem(sys.modules, "cutlass", version)
    monkeypatch.setattr(nvfp4_gemv, "current_gpu", lambda: Gpu(capability, 132))
    assert nvfp4_gemv.decode_form.__wrapped__() == form
