# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Times schedules of the decode attention, whatever the dispatch would pick."""

import functools
from collections.abc import Callable
from dataclasses import asdict

import torch
from tqdm import tqdm
from vllm.models.flint.ops.attention.config import (
    NO_WINDOW,
    DecodeConfig,
    DecodeSpec,
    split_target,
)
from vllm.models.flint.ops.attention.variants import decode_variant
from vllm.models.flint.ops.attention.workspace import DecodeWorkspace
from vllm.models.flint.ops.device import current_gpu

from attentionbench.compare import launches
from attentionbench.peers import SCALE
from attentionbench.problems import KV_HEADS, Case, Inputs
from gemvbench.library import Library
from gemvbench.timing import graph_us
from gemvbench.tune import Results


def time_schedules(
    results: Results,
    library: Library,
    cases: list[Case],
    variants: list[tuple[DecodeSpec, DecodeConfig]],
    factors: list[float],
) -> None:
    """Adds a row for each case, schedule and factor of the split target.

    Schedules that `library` lacks are left out.
    """
    sms = current_gpu().sms
    gpu = torch.device("cuda", torch.cuda.current_device())
    for case in tqdm(cases, desc="tune"):
        inputs = Inputs.rotated(case)
        # Room for twice the clusters of any target that is tried.
        workspace = DecodeWorkspace(case.batch + 8 * sms, KV_HEADS, sms, gpu)
        for spec, config in variants:
            if not library.offer([(spec, config)]):
                continue
            kernel = decode_variant(spec, config)
            for factor in factors:
                target = max(1, int(split_target(config, KV_HEADS, sms) * factor))

                rest = (
                    workspace.records,
                    workspace.counters,
                    None,
                    None,
                    case.window or NO_WINDOW,
                    target,
                    SCALE,
                )
                calls: list[Callable[[], object]] = [
                    functools.partial(
                        kernel,
                        x.q,
                        x.kv_cache,
                        x.block_tables,
                        x.seq_lens,
                        x.sinks,
                        x.out,
                        *rest,
                    )
                    for x in inputs
                ]
                us = graph_us(calls, launches(case))
                results.add(
                    case.n_bytes, us, **vars(case), factor=factor, config=asdict(config)
                )
        results.save()
        del inputs
        torch.cuda.empty_cache()


def best_table(results: Results) -> str:
    """For each case its fastest schedules."""
    lines = []
    for case in dict.fromkeys(
        (r["sliding"], r["batch"], r["context"]) for r in results.rows
    ):
        here = [
            r for r in results.rows if (r["sliding"], r["batch"], r["context"]) == case
        ]
        best = sorted(here, key=lambda r: r["us"])[:4]
        cells = (
            f"{r['us']:.2f} (w{r['config']['warps']} c{r['config']['cluster']} "
            f"t{r['config']['tiles']} x{r['factor']:g})"
            for r in best
        )
        layer = "sliding" if case[0] else "full"
        lines.append(f"{layer:<8}{case[1]:>5}{case[2]:>8}  " + "  ".join(cells))
    return "\n".join(lines)
