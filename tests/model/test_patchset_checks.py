# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A patched vLLM says what it is, and refuses Flint without a required patch."""

import json
from pathlib import Path

import pytest
from vllm.model_executor import model_loader
from vllm.model_executor.kernels import linear
from vllm.model_executor.models import config as model_configs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.models.flint import patchset
from vllm.models.flint.ops.linear import FlintNvFp4LinearKernel
from vllm.platforms import PlatformEnum
from vllm.transformers_utils import config as hf_config

REGISTER = "model-register-flint"
SPECULATORS = "bugfix-honor-hf-config-path-when-looking-for-speculators"
GGUF = "model-load-flint-from-an-nvfp4-gguf"
BACKEND = "kernel-offer-flint-s-nvfp4-gemv-as-a-linear-backend"


def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ModelRegistry.models, "FlintForCausalLM")


def without_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(hf_config._CONFIG_REGISTRY, "flint")


def without_speculators_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = hf_config.maybe_override_with_speculators

    def unfixed(model, tokenizer, trust_remote_code, **kwargs):
        kwargs.pop("hf_config_path", None)
        return fixed(model, tokenizer, trust_remote_code, **kwargs)

    monkeypatch.setattr(hf_config, "maybe_override_with_speculators", unfixed)


def without_config_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(model_configs.MODELS_CONFIG_MAP, "FlintForCausalLM")


def without_effect_of_config_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        model_configs.MODELS_CONFIG_MAP,
        "FlintForCausalLM",
        model_configs.VerifyAndUpdateConfig,
    )


def without_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "flint_gguf")


def without_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(linear._LINEAR_BACKEND_KERNEL_MAP, "flint")


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    possible = linear._POSSIBLE_NVFP4_KERNELS
    left = [k for k in possible[PlatformEnum.CUDA] if k is not FlintNvFp4LinearKernel]
    monkeypatch.setitem(possible, PlatformEnum.CUDA, left)


@pytest.fixture(autouse=True)
def fresh() -> None:
    patchset.require_patches.cache_clear()


def test_all_patches_in_force() -> None:
    patchset.require_patches()


@pytest.mark.parametrize(
    ("undo", "patch"),
    [
        (without_model, REGISTER),
        (without_config, REGISTER),
        (without_speculators_fix, SPECULATORS),
        (without_config_hook, GGUF),
        (without_effect_of_config_hook, GGUF),
        (without_loader, GGUF),
        (without_backend, BACKEND),
        (without_kernel, BACKEND),
    ],
)
def test_missing_patch_is_named(
    monkeypatch: pytest.MonkeyPatch, undo, patch: str
) -> None:
    undo(monkeypatch)
    with pytest.raises(RuntimeError) as error:
        patchset.require_patches()
    names = {name for name in patchset.CHECKS if name in str(error.value)}
    assert names == {patch}


def test_unknown_required_patch_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    identity = {
        "release": "0.32.0+flint.1",
        "base_version": "0.32.0",
        "base_commit": "0" * 40,
        "series_sha256": "0" * 64,
        "package_tree": "0" * 40,
        "required": [*patchset.CHECKS, "kernel-from-the-future"],
    }
    file = tmp_path / "_patchset.json"
    file.write_text(json.dumps(identity))
    monkeypatch.setattr(patchset, "_IDENTITY_FILE", file)
    with pytest.raises(RuntimeError, match="in force: kernel-from-the-future[.]"):
        patchset.require_patches()
