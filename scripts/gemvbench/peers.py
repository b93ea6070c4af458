# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Other ways to run the same layers: vLLM's kernels, quack's GEMM, cuBLAS."""

import functools
from typing import Any

import torch
from vllm.models.flint.ops import dense, fragments, nvfp4_gemv
from vllm.models.flint.ops.gemv.config import Layout
from vllm.models.flint.ops.norm import silu_and_mul

from gemvbench.shapes import Layer
from gemvbench.weights import Weight


class Contender:
    """One way to compute a layer; `__call__` maps x [M, K] to the output.

    Attributes:
        name: As it stands in tables.
        bf16: Whether it reads BF16 weights.
    """

    name: str
    bf16 = False

    def __init__(self, layer: Layer, weight: Weight) -> None:
        self.layer = layer
        self.prepare(weight)

    def prepare(self, weight: Weight) -> None:
        raise NotImplementedError

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if self.layer.fp32_out:
            # As vLLM's sampler does with BF16 logits.
            return out.float()
        return silu_and_mul(out) if self.layer.silu_mul else out


class Ours(Contender):
    """What Flint's linear layer does: the path that its dispatch picks.

    On SM90 with quack the weight is in fragment order, elsewhere in ModelOpt's.
    """

    name = "ours"
    layout: Layout = "fragments" if fragments.missing_quack() is None else "row_major"

    def prepare(self, weight: Weight) -> None:
        layer = self.layer
        shape = layer.shape("mul", self.layout)
        limit = nvfp4_gemv.max_tokens(
            shape.n, shape.k, shape.silu_mul, layout=self.layout
        )
        scale = weight.global_scale
        rest = (scale, layer.silu_mul, layer.fp32_out, True, limit)
        if self.layout == "fragments":
            own = fragments.to_fragments(weight.codes, weight.scales)
            self._call = functools.partial(self._fragments, *own, *rest)
        else:
            own = weight.codes, weight.swizzled()
            self._call = functools.partial(self._rows, *own, *rest)

    @classmethod
    def path(cls, layer: Layer, m: int) -> str:
        """Which kernel the dispatch picks for `m` tokens."""
        shape = layer.shape("mul", cls.layout)
        nt = nvfp4_gemv.pick_nt(shape.n, shape.k, m, shape.silu_mul, layout=cls.layout)
        if nt is not None:
            return f"GEMV, {nt} x 8 tokens"
        limit = nvfp4_gemv.max_tokens(
            shape.n, shape.k, shape.silu_mul, layout=cls.layout
        )
        if m <= limit:
            return "GEMV, several launches"
        if cls.layout == "row_major":
            return "dequantization and cuBLAS"
        tiles = fragments.measured_tiles(shape, m)
        assert tiles is not None, f"{layer.name} has no measured tiles"
        return f"quack, {tiles.tile_m}x{tiles.tile_n}, split {tiles.split_k}"

    def _fragments(self, *args: Any) -> torch.Tensor:
        return fragments.fragment_linear(args[-1], *args[:-1])

    def _rows(self, *args: Any) -> torch.Tensor:
        return dense.nvfp4_linear(args[-1], *args[:-1], None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x)[:, : self.layer.n]


class OursRowMajor(Ours):
    """The same in ModelOpt's layout, where dequantization is the partner."""

    name = "ours_row_major"
    layout = "row_major"


class OursBf16(Contender):
    """The same on BF16 weights."""

    name = "ours_bf16"
    bf16 = True

    def prepare(self, weight: Weight) -> None:
        self._weight = weight.dequantized()
        layer = self.layer
        shape = layer.n, layer.k, layer.silu_mul
        self._limit = nvfp4_gemv.max_tokens(*shape, bf16=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return dense.bf16_linear(
            x, self._weight, self.layer.silu_mul, True, self._limit
        )


class Cublas(Contender):
    name = "cublas_bf16"
    bf16 = True

    def prepare(self, weight: Weight) -> None:
        self._weight = weight.dequantized()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight)


class Quack(Contender):
    name = "quack"

    def prepare(self, weight: Weight) -> None:
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        self._gemm = gemm_w4a16
        scales = weight.scales.view(torch.float8_e4m3fn)
        self._blob, self._scales = prepare_w4_weight(weight.codes, scales, "nvfp4")
        self._scale = weight.global_scale.item()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        n = self.layer.n
        return self._gemm(
            x,
            self._blob,
            self._scales,
            tensor_scale=self._scale,
            wformat="nvfp4",
            n_out=n if n % 128 else None,
        )


class _VllmKernel(Contender):
    """One of vLLM's NVFP4 linear kernels on a bare layer."""

    def kernel_class(self) -> Any:
        raise NotImplementedError

    def prepare(self, weight: Weight) -> None:
        from vllm.model_executor.kernels.linear.nvfp4.base import (
            NvFp4LinearLayerConfig,
        )

        layer = torch.nn.Module()
        for name, value in (
            ("weight", weight.codes.clone()),
            ("weight_scale", weight.scales.view(torch.float8_e4m3fn).clone()),
            ("weight_global_scale", weight.global_scale[0].clone()),
        ):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        for name, value in (
            ("output_size_per_partition", self.layer.n),
            ("input_size_per_partition", self.layer.k),
            ("output_partition_sizes", [self.layer.n]),
            ("params_dtype", torch.bfloat16),
            ("has_bias", False),
        ):
            setattr(layer, name, value)
        self._layer = layer
        self._kernel = self.kernel_class()(NvFp4LinearLayerConfig())
        self._kernel.process_weights_after_loading(layer)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel.apply_weights(self._layer, x)


class Marlin(_VllmKernel):
    name = "marlin"

    def kernel_class(self) -> Any:
        from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel

        return MarlinNvFp4LinearKernel


class Humming(_VllmKernel):
    name = "humming"

    def kernel_class(self) -> Any:
        from vllm.model_executor.kernels.linear.nvfp4.humming import (
            HummingNvFp4LinearKernel,
        )

        return HummingNvFp4LinearKernel


CONTENDERS: dict[str, type[Contender]] = {
    c.name: c for c in (Ours, OursRowMajor, OursBf16, Cublas, Quack, Marlin, Humming)
}
