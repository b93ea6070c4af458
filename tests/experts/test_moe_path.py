# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Which layers' experts the kernels serve, and why not others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.models.flint import moe_path as path
from vllm.models.flint.ops import moe_gemv

from support.moe_layers import WIDTH, bf16_experts, nvfp4_experts, one_rank

FACTS = path.MoEFacts(
    off=None,
    capability=90,
    missing_compiler=None,
    kernel=path.NVFP4_EXPERTS,
    weights="NVFP4 experts",
    dtype=torch.bfloat16,
    moe_backend="auto",
    scores="sigmoid",
    renormalized=True,
)


@pytest.mark.parametrize("capability", [90, 100, 103, 120, 121])
@pytest.mark.parametrize("kernel", [path.NVFP4_EXPERTS, path.BF16_EXPERTS])
def test_served(capability: int, kernel: str) -> None:
    facts = replace(FACTS, capability=capability, kernel=kernel)
    assert path.why_not_kernels(facts) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": None}, "require CUDA"),
        ({"capability": 80}, "sm_90"),
        ({"off": "they are switched off"}, "they are switched off"),
        ({"kernel": None, "weights": "experts of X"}, "do not serve experts of X"),
        ({"disabled": ("FlintNvfp4Experts",)}, "VLLM_DISABLED_KERNELS"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT"),
        ({"moe_backend": "marlin"}, "--moe-backend asks for marlin"),
        ({"missing_compiler": "4.8 is needed, found 4.9"}, "4.8 is needed"),
        ({"dtype": torch.float16}, "float16"),
        ({"scores": "softmax"}, "sigmoid scores"),
        ({"renormalized": False}, "sigmoid scores"),
        ({"spread": "expert parallelism"}, "expert parallelism spreads"),
        ({"microbatches": True}, "microbatches"),
        ({"reports_routing": True}, "which experts"),
        ({"shape": "64 is no multiple of 128"}, "64 is no multiple"),
        ({"padded": True}, "rounded up the size of NVFP4 experts"),
    ],
)
def test_left_to_vllm(change: dict[str, Any], reason: str) -> None:
    assert reason in (path.why_not_kernels(replace(FACTS, **change)) or "")


def test_each_kernel_is_disabled_by_its_own_name() -> None:
    facts = replace(FACTS, disabled=(path.BF16_EXPERTS,))
    assert path.why_not_kernels(facts) is None
    facts = replace(facts, kernel=path.BF16_EXPERTS)
    assert path.BF16_EXPERTS in (path.why_not_kernels(facts) or "")


def facts_with(experts: Any, **config: Any) -> path.MoEFacts:
    with set_current_vllm_config(VllmConfig(**config)):
        return path.facts_of(experts)


@pytest.fixture(autouse=True, scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


def test_facts_of_nvfp4_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "A,B")
    found = facts_with(nvfp4_experts(), additional_config={"flint_kernels": True})
    assert found == replace(
        FACTS,
        capability=None,
        dtype=torch.get_default_dtype(),
        missing_compiler=found.missing_compiler,
        disabled=("A", "B"),
    )


def test_quantized_activations_are_not_served() -> None:
    found = facts_with(nvfp4_experts("NVFP4"))
    assert found.kernel is None
    assert "quantized activations" in found.weights


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        (UnquantizedMoeBackend.TRITON, path.BF16_EXPERTS),
        # These put up before gate, or shuffle the rows.
        (UnquantizedMoeBackend.FLASHINFER_CUTLASS, None),
        (UnquantizedMoeBackend.FLASHINFER_TRTLLM, None),
        (UnquantizedMoeBackend.CPU, None),
    ],
)
def test_bf16_experts_by_their_order(backend, kernel) -> None:
    experts = bf16_experts()
    experts.quant_method.unquantized_backend = backend
    found = facts_with(experts)
    assert found.kernel == kernel
    assert kernel is not None or backend.value in found.weights


def test_other_methods_are_named() -> None:
    experts = bf16_experts()
    experts.quant_method.__class__ = type("Other", (type(experts.quant_method),), {})
    assert facts_with(experts).weights == "experts of Other"


@pytest.mark.parametrize("make", [nvfp4_experts, bf16_experts])
def test_sizes_are_asked_for_before_loading(
    monkeypatch: pytest.MonkeyPatch, make
) -> None:
    """The kernels' own check sees vLLM's parameters."""
    monkeypatch.setattr(moe_gemv, "decode_form", lambda: "mul")
    assert f"{WIDTH} rows is no multiple of 128" in path._why_no_shape(make())


@pytest.mark.parametrize(
    ("change", "spread"),
    [
        ({"use_ep": True}, "expert parallelism"),
        ({"sp_size": 2}, "sequence parallelism"),
        ({"dp_size": 2}, "data parallelism"),
        ({"pcp_size": 2}, "context parallelism"),
        ({"tp_size": 2}, None),
    ],
)
def test_spread(change: dict[str, Any], spread: str | None) -> None:
    experts = bf16_experts()
    moe = experts.moe_config
    moe.moe_parallel_config = replace(moe.moe_parallel_config, **change)
    assert facts_with(experts).spread == spread


@pytest.mark.parametrize("field", ["hidden_dim", "intermediate_size_per_partition"])
def test_padding(field: str) -> None:
    experts = bf16_experts()
    assert not facts_with(experts).padded
    setattr(experts.moe_config, field, 4096)
    assert facts_with(experts).padded
