# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times schedules of the GEMV, and the GEMV beside its partner."""

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm.models.flint.ops import dense
from vllm.models.flint.ops.fragments import to_fragments
from vllm.models.flint.ops.gemv.config import GemvConfig, GemvSpec, Layout
from vllm.models.flint.ops.gemv.variants import gemv_variant

from gemvbench.library import Library
from gemvbench.sets import Variant
from gemvbench.shapes import Layer
from gemvbench.table import GEMV, PARTNER, Rows
from gemvbench.timing import copy_bandwidth, graph_us
from gemvbench.weights import Weight, copies_of, weight_bytes
from provenance import provenance

# For how many tokens schedules of so many 8-token tiles are timed.
_TOKENS = {1: (1, 8), 2: (9, 16), 4: (17, 32), 8: (33, 48, 64)}


class Results:
    """Measured rows, saved as they come, until the time is up."""

    def __init__(self, path: Path, seconds: float = math.inf) -> None:
        self.path = path
        self._end = time.monotonic() + seconds
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

    def out_of_time(self, left_out: str) -> bool:
        """Whether the time is up; says what is then left out."""
        if time.monotonic() < self._end:
            return False
        tqdm.write(f"no time left for {left_out}")
        return True

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "gpu": self.gpu,
            "copy_tb_s": round(self.copy_tb_s, 3),
            "rows": self.rows,
            "failures": self.failures,
        } | provenance()
        self.path.write_text(json.dumps(content))


def operands(
    layer: Layer, form: str, layout: Layout
) -> list[tuple[torch.Tensor | None, ...]]:
    """Copies of a weight: words, scale words and global scale, or words alone."""
    copies = copies_of(weight_bytes(layer.n, layer.k, form == "bf16"))
    found: list[tuple[torch.Tensor | None, ...]] = []
    for _ in range(copies):
        if form == "bf16":
            dense_weight = torch.randn(layer.n, layer.k, device="cuda").bfloat16()
            found.append((dense_weight.view(torch.int32), None, None))
            continue
        weight = Weight.random(layer.n, layer.k)
        if layout == "fragments":
            codes, scales = to_fragments(weight.codes, weight.scales)
            codes = codes.flatten(1)
        else:
            codes, scales = weight.codes, weight.swizzled()
        words = codes.view(torch.int32), scales.view(-1).view(torch.int32)
        found.append((*words, weight.global_scale))
    return found


def time_schedules(
    results: Results, library: Library, sweeps: dict[Layer, list[Variant]]
) -> None:
    """Adds rows for each schedule, over the counts of tokens that it is for.

    Schedules that spill registers, and those that `library` lacks, are left out.
    """
    for layer, variants in tqdm(sweeps.items(), desc="tune"):
        if results.out_of_time(f"schedules of {layer.name}"):
            continue
        weights: list[tuple[torch.Tensor | None, ...]] = []
        for variant in variants:
            usage = library.usage(variant)
            if usage.get("stack") or usage.get("local") or not library.offer([variant]):
                continue
            spec, config = variant
            assert isinstance(spec, GemvSpec) and isinstance(config, GemvConfig)
            weights = weights or operands(layer, spec.form, spec.layout)
            shape = layer.shape(spec.form, spec.layout)
            for m in _TOKENS[config.nt]:
                us = graph_us(_launches(shape.n, spec, config, weights, m))
                results.add(
                    weight_bytes(layer.n, layer.k, spec.is_bf16),
                    us,
                    n=shape.n,
                    k=shape.k,
                    silu_mul=shape.silu_mul,
                    form=spec.form,
                    layout=spec.layout,
                    m=m,
                    registers=usage.get("reg"),
                    config=asdict(config),
                )
        results.save()


def _launches(
    n: int,
    spec: GemvSpec,
    config: GemvConfig,
    weights: list[tuple[torch.Tensor | None, ...]],
    m: int,
) -> list[Callable[[], object]]:
    x = torch.randn(m, spec.k, device="cuda").bfloat16()
    dtype = torch.float32 if spec.fp32_out else torch.bfloat16
    out = torch.empty(m, n // spec.parts, dtype=dtype, device="cuda")
    kernel = gemv_variant(spec, config)
    return [functools.partial(kernel, x, *w, out) for w in weights]


def _calls(
    layer: Layer, form: str, x: torch.Tensor, path: str
) -> list[Callable[[], object]]:
    most = 1 << 30 if path == GEMV else 0
    calls: list[Callable[[], object]] = []
    if form == "bf16":
        for words, _, _ in operands(layer, form, "row_major"):
            assert words is not None
            weight = words.view(torch.bfloat16)
            args = (x, weight, layer.silu_mul, True, most)
            calls.append(functools.partial(dense.bf16_linear, *args))
        return calls
    for codes, scales, gs in operands(layer, form, "row_major"):
        assert codes is not None and scales is not None and gs is not None
        call = functools.partial(
            dense.nvfp4_linear,
            x,
            codes.view(torch.uint8),
            scales.view(torch.uint8),
            gs,
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
                    layout="row_major",
                    m=m,
                    path=path,
                )
        results.save()
