# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that vLLM carries the patches which Flint relies on.

A vLLM that lost one of them in a rebase may still start and answer wrongly. Each
check asks for the behaviour that its patch brings, so that a patch that applied
cleanly but has no effect any more is noticed too.
"""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

# Written when the patch set is applied; absent in a plain source checkout.
_IDENTITY_FILE = Path(__file__).with_name("_patchset.json")


def _registers_flint() -> bool:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from .configs import FlintConfig

    return (
        "FlintForCausalLM" in ModelRegistry.get_supported_archs()
        and "flint" in _CONFIG_REGISTRY
        and _CONFIG_REGISTRY["flint"] is FlintConfig
    )


def _loads_gguf() -> bool:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .gguf_config import LOAD_FORMAT
    from .gguf_loader import FlintGGUFModelLoader

    # The config hook has to refuse this format for a folder without a GGUF file.
    load_config = LoadConfig(load_format=LOAD_FORMAT)
    model_config = SimpleNamespace(model=str(Path(__file__).parent), revision=None)
    config: Any = SimpleNamespace(model_config=model_config, load_config=load_config)
    loader = None
    try:
        loader = get_model_loader(load_config)
        MODELS_CONFIG_MAP["FlintForCausalLM"].verify_and_update_config(config)
    except KeyError:
        return False
    except ValueError:
        return isinstance(loader, FlintGGUFModelLoader)
    return False


def _honors_hf_config_path() -> bool:
    from vllm.transformers_utils.config import maybe_override_with_speculators

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text("{}")
        model = str(Path(folder, "model.gguf"))
        try:
            found = maybe_override_with_speculators(
                model, None, trust_remote_code=False, hf_config_path=folder
            )
        except (OSError, TypeError):
            return False
    return found == (model, None, None)


def _offers_linear_backend() -> bool:
    from vllm.config.kernel import KernelConfig
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from .ops.linear import FlintNvFp4LinearKernel

    try:
        chosen = KernelConfig(linear_backend="flint").linear_backend
    except ValueError:
        return False
    possible = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    return linear._filter_kernels_by_backend(chosen, possible) == [
        FlintNvFp4LinearKernel
    ]


# The stem of a patch's file name and whether that patch is in force.
CHECKS: dict[str, Callable[[], bool]] = {
    "model-register-flint": _registers_flint,
    "bugfix-honor-hf-config-path-when-looking-for-speculators": _honors_hf_config_path,
    "model-load-flint-from-an-nvfp4-gguf": _loads_gguf,
    "kernel-offer-flint-s-nvfp4-gemv-as-a-linear-backend": _offers_linear_backend,
}


@functools.cache
def require_patches() -> None:
    """Print what this vLLM is, and refuse to go on without a required patch.

    Raises:
        RuntimeError: A required patch is not in force.

    """
    identity = None
    if _IDENTITY_FILE.exists():
        identity = json.loads(_IDENTITY_FILE.read_text())
        logger.info(
            "Flint patch set %s: base vLLM %s (%s), series %s, tree %s",
            identity["release"],
            identity["base_version"],
            identity["base_commit"],
            identity["series_sha256"][:12],
            identity["package_tree"][:12],
        )
    else:
        logger.warning("This vLLM holds Flint but was not made by its patch set")
    required = identity["required"] if identity else list(CHECKS)
    broken = [name for name in required if name not in CHECKS or not CHECKS[name]()]
    if broken:
        raise RuntimeError(
            f"Flint needs patches that this vLLM does not have in force: "
            f"{', '.join(broken)}. Install the patched wheel, or apply the patch set "
            "to this vLLM again."
        )
