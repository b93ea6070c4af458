# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What is chosen and refused, and why, without a GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel
from vllm.models.flint.ops import linear, nvfp4_gemv
from vllm.models.flint.ops.gemv import tables, variants
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec
from vllm.platforms import PlatformEnum

from gemvbench import sets, table

KERNEL = linear.FlintNvFp4LinearKernel


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_gemv, "_device", lambda: ((9, 0), 132))


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
        assert nvfp4_gemv.tuned(shape.n, shape.k, shape.silu_mul, shape.bf16) == (
            entry.max_tokens > 0
        )
    for spec, config in sets.served("sm90", "mul") + sets.tested("sm90", "mul"):
        if isinstance(config, GemvConfig):
            assert config.why_not(spec) is None


@pytest.mark.parametrize("k", [32, 64, 128, 2048, 4096, 6144, 16384])
@pytest.mark.parametrize("nt", [1, 2, 4])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_every_shape_has_a_schedule(k: int, nt: int, silu_mul: bool) -> None:
    """Small N, which no cluster fills, and K too long for one CTA's shared memory."""
    spec = GemvSpec(k, "mul", silu_mul=silu_mul)
    for n in (16, 256, 2048, 12288):
        config = tables.default_config(spec, n, nt, 132)
        assert config.why_not(spec) is None


def test_pick_nt(h200: None) -> None:
    assert nvfp4_gemv.pick_nt(5120, 2048, 1) == 1
    assert nvfp4_gemv.pick_nt(5120, 2048, 8) == 1
    assert nvfp4_gemv.pick_nt(5120, 2048, 0) is None
    assert nvfp4_gemv.pick_nt(5120, 2048, 100000) is None
    assert nvfp4_gemv.pick_nt(5121, 2048, 1) is None
    assert nvfp4_gemv.max_tokens(5121, 2048, bf16=True) == 0


def test_table_keeps_the_fastest_and_the_limit(tmp_path: Path) -> None:
    """Hand-made times: the second schedule wins, the partner does from 64 tokens on."""

    def row(m: int, us: float, **more) -> dict:
        shape = {"n": 64, "k": 128, "silu_mul": False, "form": "mul"}
        return shape | {"m": m, "us": us} | more

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
    monkeypatch.setattr(nvfp4_gemv, "_device", lambda: (capability, 132))
    assert nvfp4_gemv._decode_form.__wrapped__() == form
