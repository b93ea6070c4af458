# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times schedules of the GEMV, and the GEMV beside its partner."""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm.models.flint.ops import dense
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec
from vllm.models.flint.ops.gemv.variants import gemv_variant

from gemvbench.library import Library
from gemvbench.sets import Variant
from gemvbench.shapes import Layer
from gemvbench.table import GEMV, PARTNER, Rows
from gemvbench.timing import copy_bandwidth, graph_us
from gemvbench.weights import Weight, copies_of, weight_bytes


class Results:
    """Measured rows, saved as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpu = torch.cuda.get_device_name()
        self.copy_tb_s = copy_bandwidth()
        self.rows: Rows = []
        self.failures: Rows = []
        print(f"{self.gpu}, copy bandwidth {self.copy_tb_s:.2f} TB/s", flush=True)

    def add(self, size: int, us: float, **row: Any) -> None:
        """Adds one measurement of a kernel that reads `size` bytes."""
        tb_s = size / us / 1e6
        row |= {"us": round(us, 3), "tb_s": round(tb_s, 3)}
        self.rows.append(row | {"percent": round(100 * tb_s / self.copy_tb_s, 1)})

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "gpu": self.gpu,
            "copy_tb_s": round(self.copy_tb_s, 3),
            "rows": self.rows,
            "failures": self.failures,
        }
        self.path.write_text(json.dumps(content))


def _operands(layer: Layer, form: str) -> list[tuple[torch.Tensor | None, ...]]:
    copies = copies_of(weight_bytes(layer.n, layer.k, form == "bf16"))
    found: list[tuple[torch.Tensor | None, ...]] = []
    for _ in range(copies):
        if form == "bf16":
            dense_weight = torch.randn(layer.n, layer.k, device="cuda").bfloat16()
            found.append((dense_weight.view(torch.int32), None, None))
        else:
            weight = Weight.random(layer.n, layer.k)
            scales = weight.swizzled().view(torch.int32)
            found.append((weight.codes.view(torch.int32), scales, weight.global_scale))
    return found


def time_schedules(
    results: Results, library: Library, sweeps: dict[Layer, list[Variant]]
) -> None:
    """Adds rows for each schedule, at the fewest and the most tokens that it is for.

    Schedules that spill registers, and those that `library` lacks, are left out.
    """
    for layer, variants in tqdm(sweeps.items(), desc="tune"):
        operands: list[tuple[torch.Tensor | None, ...]] = []
        for variant in variants:
            usage = library.usage(variant)
            if usage.get("stack") or usage.get("local") or not library.offer([variant]):
                continue
            spec, config = variant
            assert isinstance(spec, GemvSpec) and isinstance(config, GemvConfig)
            operands = operands or _operands(layer, spec.form)
            for m in (1, 8) if config.nt == 1 else (4 * config.nt + 1, 8 * config.nt):
                us = graph_us(_launches(layer, spec, config, operands, m))
                results.add(
                    weight_bytes(layer.n, layer.k, spec.is_bf16),
                    us,
                    n=layer.n,
                    k=layer.k,
                    silu_mul=layer.silu_mul,
                    form=spec.form,
                    m=m,
                    registers=usage.get("reg"),
                    config=asdict(config),
                )
        results.save()


def _launches(
    layer: Layer,
    spec: GemvSpec,
    config: GemvConfig,
    operands: list[tuple[torch.Tensor | None, ...]],
    m: int,
) -> list[Callable[[], object]]:
    x = torch.randn(m, layer.k, device="cuda").bfloat16()
    dtype = torch.float32 if layer.fp32_out else torch.bfloat16
    out = torch.empty(m, layer.n // spec.parts, dtype=dtype, device="cuda")
    kernel = gemv_variant(spec, config)
    return [functools.partial(kernel, x, *w, out) for w in operands]


def _calls(
    layer: Layer, form: str, x: torch.Tensor, path: str
) -> list[Callable[[], object]]:
    most = 1 << 30 if path == GEMV else 0
    calls: list[Callable[[], object]] = []
    if form == "bf16":
        for words, _, _ in _operands(layer, form):
            assert words is not None
            weight = words.view(torch.bfloat16)
            args = (x, weight, layer.silu_mul, True, most)
            calls.append(functools.partial(dense.bf16_linear, *args))
        return calls
    for codes, scales, gs in _operands(layer, form):
        assert codes is not None and scales is not None and gs is not None
        call = functools.partial(
            dense.nvfp4_linear,
            x,
            codes.view(torch.uint8),
            scales.view(torch.uint8),
            gs,
            gs.item(),
            layer.silu_mul,
            layer.fp32_out,
            True,
            most,
            None,
        )
        calls.append(call)
    return calls


def time_paths(
    results: Results, layers: list[Layer], form: str, tokens: list[int]
) -> None:
    """Adds rows for the GEMV, in several launches, and what else reads these bytes."""
    for layer in tqdm(layers, desc=f"paths {form}"):
        size = weight_bytes(layer.n, layer.k, form == "bf16")
        for m in tokens:
            x = torch.randn(m, layer.k, device="cuda").bfloat16()
            for path in (GEMV, PARTNER):
                us = graph_us(_calls(layer, form, x, path))
                results.add(
                    size,
                    us,
                    n=layer.n,
                    k=layer.k,
                    silu_mul=layer.silu_mul,
                    form=form,
                    m=m,
                    path=path,
                )
        results.save()
