# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How vLLM's config is set up to serve Flint from a GGUF file."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from .errors import FlintCheckpointError
from .gguf_checkpoint import FlintGGUF
from .gguf_file import open_gguf
from .gguf_nvfp4 import GROUP_SIZE, find_gguf_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig

logger = init_logger(__name__)

LOAD_FORMAT = "flint_gguf"
_QUANT_ALGO = "W4A16_NVFP4"
_MIN_NVFP4_CAPABILITY = 75


def configure_gguf(vllm_config: "VllmConfig") -> None:
    """Set the load format and the quantization of a GGUF model.

    Args:
        vllm_config: The engine's configuration; unchanged for other models.

    Raises:
        FlintCheckpointError: The GGUF file is damaged, does not fit the config, or the
            load format that was asked for cannot read it.

    """
    model_config = vllm_config.model_config
    load_config = vllm_config.load_config
    path = gguf_path(model_config, load_config)
    if path is None:
        if load_config.load_format == LOAD_FORMAT:
            raise FlintCheckpointError(
                f"--load-format {LOAD_FORMAT}: no GGUF file in {model_config.model}"
            )
        return
    if load_config.load_format in ("auto", "hf"):
        load_config.load_format = LOAD_FORMAT
    elif load_config.load_format not in (LOAD_FORMAT, "dummy"):
        raise FlintCheckpointError(
            f"--load-format {load_config.load_format} cannot read {path}; leave "
            "the option out"
        )
    modules = FlintGGUF(open_gguf(path), model_config.hf_config).nvfp4_modules()
    if not modules:
        return
    reason = _why_not_nvfp4(model_config)
    if reason is not None:
        logger.warning(
            "%s is NVFP4, but %s: its weights are expanded to %s, which takes "
            "about 3.5 times the memory",
            path,
            reason,
            model_config.dtype,
        )
        return
    model_config.hf_config.quantization_config = quantization_config(modules)
    model_config.model_arch_config = model_config.get_model_arch_config()
    model_config._verify_quantization()


def quantization_config(modules: Iterable[str]) -> dict[str, Any]:
    """Describe NVFP4 weights with 16-bit activations as ModelOpt's config does.

    Args:
        modules: Checkpoint names of the modules that are NVFP4.

    """
    layer = {"quant_algo": _QUANT_ALGO, "group_size": GROUP_SIZE}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {module: dict(layer) for module in sorted(modules)},
    }


def gguf_path(model_config: "ModelConfig", load_config: "LoadConfig") -> str | None:
    """Find the GGUF file to serve, or None where the model is served otherwise."""
    model, revision = model_config.model, model_config.revision
    # Where a repository has both, safetensors win, as for any other model.
    if (
        load_config.load_format != LOAD_FORMAT
        and not model.endswith(".gguf")
        and list_filtered_repo_files(model, ["*.safetensors"], revision)
    ):
        return None
    return find_gguf_file(model, revision, load_config.download_dir)


def _why_not_nvfp4(model_config: "ModelConfig") -> str | None:
    if not current_platform.is_cuda():
        return f"{current_platform.device_name} has no kernel for it"
    if not current_platform.has_device_capability(_MIN_NVFP4_CAPABILITY):
        return "this GPU is older than compute capability 7.5"
    if model_config.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels do not compute in {model_config.dtype}"
    return None
