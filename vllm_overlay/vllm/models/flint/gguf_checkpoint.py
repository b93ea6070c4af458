# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that a GGUF file holds the whole of one Flint model."""

import numpy as np
import torch

from .checkpoint import expected_tensors, join_names
from .configs import FlintConfig
from .gguf_file import GGUFFile, GGUFFileError, GGUFTensor
from .gguf_names import checkpoint_name, scale_name

NVFP4 = "NVFP4"
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FlintGGUF:
    """A GGUF file that has been checked to hold the whole of one Flint model.

    Args:
        file: The opened file.
        config: The model's configuration.

    Raises:
        GGUFFileError: The file is of another model or another numeric, or a tensor
            is missing, unknown, of the wrong shape or of a type that is not served.

    """

    def __init__(self, file: GGUFFile, config: FlintConfig) -> None:
        self.file = file
        self._config = config
        self._check_metadata()
        weights = {
            name: tensor
            for name, tensor in file.tensors.items()
            if not name.endswith(".scale")
        }
        self._check_tensors(weights)
        self.weights = weights
        self._check_merged_scales()

    def _fail(self, problem: str) -> None:
        raise GGUFFileError(self.file.path, problem)

    def _check_metadata(self) -> None:
        metadata = self.file.metadata
        if (arch := metadata.get("general.architecture")) != "flint":
            self._fail(f"its architecture is {arch!r}, not 'flint'")
        if np.any(metadata.get("general.tensor_extra.prec_a4", False)):
            self._fail(
                "it asks for 4-bit activations (general.tensor_extra.prec_a4), which "
                "Flint's kernels do not compute; use a file with 16-bit activations"
            )

    def _check_tensors(self, weights: dict[str, GGUFTensor]) -> None:
        config = self._config
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in expected_tensors(config).items():
            stem, experts, rest = name.partition(".mlp.experts.")
            if experts:
                _, _, projection = rest.partition(".")
                name = f"{stem}{experts}{{}}.{projection}"
                shape = (config.num_experts, *shape)
            wanted[name] = shape
        unknown = []
        for name, tensor in weights.items():
            checkpoint = checkpoint_name(name)
            if checkpoint not in wanted:
                unknown.append(name)
                continue
            shape = wanted.pop(checkpoint)
            if tensor.shape != shape:
                self._fail(
                    f"{name} has shape {list(tensor.shape)}, but the config asks for "
                    f"{list(shape)}; do config.json and GGUF belong together?"
                )
            self._check_type(tensor)
        if wanted:
            self._fail(f"tensors are missing: {join_names(wanted)}; download it again")
        scales = {scale_name(n) for n, t in weights.items() if t.type_name == NVFP4}
        unknown += [
            n for n in self.file.tensors if n.endswith(".scale") and n not in scales
        ]
        if unknown:
            self._fail(f"it has tensors that Flint does not: {join_names(unknown)}")

    def _check_type(self, tensor: GGUFTensor) -> None:
        if tensor.type_name in PLAIN_TYPES:
            return
        if tensor.type_name != NVFP4:
            self._fail(
                f"{tensor.name} has type {tensor.type_name}; served are NVFP4, BF16, "
                "F16 and F32"
            )
        name = scale_name(tensor.name)
        scale = self.file.tensors.get(name)
        count = self._config.num_experts if len(tensor.shape) == 3 else 1
        if scale is None:
            self._fail(f"{name}, the global scale of {tensor.name}, is missing")
        elif scale.type_name != "F32" or scale.shape != (count,):
            self._fail(
                f"{name} is {scale.type_name} {list(scale.shape)}, but has to be F32 "
                f"[{count}]"
            )
        elif not np.isfinite(values := scale.data.view(np.float32)).all() or (
            (values <= 0).any()
        ):
            self._fail(f"{name} has a scale that is not a positive number")

    def _check_merged_scales(self) -> None:
        shards: dict[str, list[str]] = {}
        for name, tensor in self.weights.items():
            if tensor.type_name == NVFP4:
                module = (checkpoint_name(name) or "").removesuffix(".weight")
                shards.setdefault(_fused(module), []).append(name)
        for first, *others in shards.values():
            for other in others:
                one, two = self.global_scale(first), self.global_scale(other)
                unequal = torch.nonzero(one != two)
                if len(unequal):
                    i = int(unequal[0, 0])
                    self._fail(
                        f"{scale_name(first)}[{i}] is {one[i].item()!r} but "
                        f"{scale_name(other)}[{i}] is {two[i].item()!r}: fused "
                        "projections need one global scale; quantize it again"
                    )

    def global_scale(self, name: str) -> torch.Tensor:
        """Return an NVFP4 weight's global scales, FP32 [1] or [num_experts]."""
        data = self.file.tensors[scale_name(name)].data
        return torch.from_numpy(data.view(np.float32).copy())

    def nvfp4_modules(self) -> set[str]:
        """Name the modules that can stay in NVFP4.

        Returns:
            Checkpoint names such as `model.layers.0.self_attn.q_proj`; a layer's
            routed experts count as one module. A fused linear, or a layer's experts,
            is in the set only if all its parts are NVFP4.

        """
        fused: dict[str, list[GGUFTensor]] = {}
        for name, tensor in self.weights.items():
            module = module_of(checkpoint_name(name) or "")
            if module is not None:
                fused.setdefault(_fused(module), []).append(tensor)
        quantized = {
            f for f, parts in fused.items() if {p.type_name for p in parts} == {NVFP4}
        }
        modules = (module_of(checkpoint_name(name) or "") for name in self.weights)
        return {m for m in modules if m is not None and _fused(m) in quantized}


def module_of(name: str) -> str | None:
    """Name the module of a checkpoint weight that a linear or expert kernel reads."""
    module = name.removesuffix(".weight")
    stem, experts, _ = module.partition(".mlp.experts")
    if experts:
        return f"{stem}{experts}"
    return module if module == "lm_head" or module.endswith("_proj") else None


def _fused(module: str) -> str:
    parent, _, shard = module.rpartition(".")
    if shard in ("q_proj", "k_proj", "v_proj"):
        return f"{parent}.qkv_proj"
    return f"{parent}.gate_up_proj" if shard in ("gate_proj", "up_proj") else module
