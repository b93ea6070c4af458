# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A whole sparse decoder layer, stage by stage, on rotated weights.

A stage starts while the one before it drains, so that its share of a layer is not its
time alone: both are measured, the latter in a graph of nothing else, the former as what
a graph of the layer gains when the stage is left out of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from vllm.models.flint.ops import moe, moe_gemv
from vllm.models.flint.ops.decode_attention import (
    DecodeWorkspace,
    flint_decode_attention,
)
from vllm.models.flint.ops.device import current_gpu
from vllm.models.flint.ops.qkv_fused import qkv_of_layer

from attentionbench.peers import SCALE
from attentionbench.problems import HEAD_DIM, HEADS, KV_HEADS, Case, Inputs
from enginebench.models import FLINT
from gemvbench.peers import Ours as OurLinear
from gemvbench.shapes import Layer
from gemvbench.table import Rows
from gemvbench.timing import graph_us
from gemvbench.tune import Results
from gemvbench.weights import Weight, weight_bytes
from moebench.ours import Ours, gemv_weight
from moebench.weights import EPS, BlockWeights, Sizes, Tokens, met

ALL = "layer"
_QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM


class DecoderLayer:
    """One layer's weights and what passes between its stages.

    A stage reads what the last run of the ones before it left, so that it can run
    alone.

    Args:
        case: The requests.
        workspace: The attention's, shared by all layers.
        packed: Whether the experts' codes are packed.
    """

    def __init__(
        self, case: Case, workspace: DecodeWorkspace, packed: bool = False
    ) -> None:
        sizes = Sizes.of(FLINT)
        self.case, self.weights = case, BlockWeights.random(sizes)
        self._workspace, self._block = workspace, Ours(self.weights, packed)
        self._keys = Inputs.random(case)
        self._qkv = gemv_weight(Weight.random(_QKV_ROWS, sizes.hidden))
        o_proj = Layer(sizes.hidden, HEADS * HEAD_DIM)
        self._o_proj = OurLinear(o_proj, Weight.random(o_proj.n, o_proj.k))
        self._head_norm = torch.rand(HEAD_DIM, device="cuda").add_(0.5).bfloat16()
        positions = torch.arange(case.context, device="cuda", dtype=torch.float32)
        rates = 1e4 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
        angles = positions[:, None] * rates
        table = torch.cat([angles.cos(), angles.sin()], -1)
        # Full layers have no RoPE.
        self._table = table if case.sliding else None
        pages, self._page = self._keys.block_tables, self._keys.kv_cache.shape[2]
        last = case.context - 1
        self._slots = pages[:, last // self._page].long() * self._page
        self._slots += last % self._page
        self._positions = torch.full_like(self._slots, last)
        self.input = Tokens.random(case.batch, sizes.hidden)
        self._made: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._old_ids: torch.Tensor | None = None

    def keep(self) -> None:
        """Keeps what the stages made, for those that run without the ones before."""
        self._kept = dict(self._made)

    def start_over(self, wanted: set[str]) -> None:
        """Forgets what stages made in a graph, whose memory is given up with it.

        Args:
            wanted: Stages that run next.
        """
        self._made = dict(self._kept)
        # `down_combine` reads ids before its wait: whoever launches right before it
        # must not write them.
        self._old_ids = self._kept["ids"] if "gate_up" not in wanted else None

    def stages(self) -> dict[str, Callable[[], None]]:
        """All stages, in order, by name."""
        return {
            "qkv": self._run_qkv,
            "attention": self._run_attention,
            "o_proj": self._run_o_proj,
            "route": self._run_route,
            "gate_up": self._run_gate_up,
            "down_combine": self._run_down,
        }

    def n_bytes(self) -> dict[str, float]:
        """Bytes of weights, keys and values that each stage reads."""
        sizes = self.weights.sizes
        experts = met(self._made["ids"])
        routed = experts * weight_bytes(sizes.width, sizes.hidden, False)
        shared = weight_bytes(sizes.shared, sizes.hidden, False)
        return {
            "qkv": weight_bytes(_QKV_ROWS, sizes.hidden, False),
            "attention": self.case.n_bytes,
            "o_proj": weight_bytes(sizes.hidden, HEADS * HEAD_DIM, False),
            "route": weight_bytes(sizes.experts, sizes.hidden, True),
            "gate_up": 2 * (routed + shared),
            "down_combine": routed + shared,
        }

    def _run_qkv(self) -> None:
        k_cache, v_cache = self._keys.kv_cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
        q, self._made["stream"] = qkv_of_layer(
            self.input.x,
            self.input.residual,
            self.weights.norm,
            EPS,
            self._qkv,
            self._head_norm,
            self._head_norm,
            EPS,
            self._table,
            self._positions,
            k_cache,
            v_cache,
            self._slots,
            HEADS,
            KV_HEADS,
            launch_dependents=True,
        )
        self._made["q"] = q

    def _run_attention(self) -> None:
        keys, q = self._keys, self._made["q"]
        out = torch.empty_like(q)
        flint_decode_attention(
            q,
            keys.kv_cache,
            keys.block_tables,
            keys.seq_lens,
            keys.sinks,
            self.case.window,
            SCALE,
            out,
            workspace=self._workspace,
            early_reads=True,
        )
        self._made["attended"] = out.flatten(1)

    def _run_o_proj(self) -> None:
        self._made["attn_out"] = self._o_proj(self._made["attended"])

    def _run_route(self) -> None:
        made, sizes = self._made, self.weights.sizes
        made["normed"], made["new_residual"], made["ids"], made["shares"] = moe.route(
            made["attn_out"],
            made["stream"],
            self.weights.norm,
            EPS,
            self._block.layer.router,
            sizes.top_k,
            self._block.counter,
        )

    def _run_gate_up(self) -> None:
        made, layer = self._made, self._block.layer
        normed, ids = made["normed"], made["ids"]
        made["act"] = normed.new_empty((ids.numel(), self.weights.sizes.width))
        made["sact"] = normed.new_empty((len(ids), self.weights.sizes.shared))
        experts = layer.experts
        first = experts.w1, experts.w1_scale, experts.alpha1
        shared = layer.shared_gate_up, None, None
        moe_gemv.gate_up(normed, ids, *first, made["act"], *shared, made["sact"])

    def _run_down(self) -> None:
        made, layer = self._made, self._block.layer
        made["out"] = torch.empty_like(made["normed"])
        experts = layer.experts
        second = experts.w2, experts.w2_scale, experts.alpha2
        moe_gemv.down_combine(
            made["act"],
            made["ids"] if self._old_ids is None else self._old_ids,
            made["shares"],
            *second,
            made["sact"],
            layer.shared_down,
            None,
            None,
            made["out"],
        )


def _run(stages: list[Callable[[], None]]) -> None:
    for stage in stages:
        stage()


def count_launches(run: Callable[[], None]) -> int:
    """Kernels, copies and fills that one run launches."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in found.events())


def _timed(layers: list[DecoderLayer], wanted: set[str]) -> float:
    """Microseconds of some stages of a layer, in their order."""
    calls: list[Callable[[], object]] = []
    for layer in layers:
        layer.start_over(wanted)
        parts = [run for name, run in layer.stages().items() if name in wanted]
        calls.append(functools.partial(_run, parts))
    return graph_us(calls)


def time_layer(
    results: Results, cases: list[Case], copies: int, packed: bool = False
) -> None:
    """Adds rows of the layer and of each stage, for each case."""
    sms, gpu = current_gpu().sms, torch.device("cuda", torch.cuda.current_device())
    for case in tqdm(cases, desc="layer"):
        if results.out_of_time(str(case)):
            break
        workspace = DecodeWorkspace(case.batch, KV_HEADS, sms, gpu)
        layers = [DecoderLayer(case, workspace, packed) for _ in range(copies)]
        everything = [list(layer.stages().values()) for layer in layers]
        for layer, stages in zip(layers, everything, strict=True):
            _run(stages)
            layer.keep()
        sizes = layers[0].n_bytes()
        names = set(sizes)
        whole = _timed(layers, names)
        launches = count_launches(functools.partial(_run, everything[0]))
        total = round(sum(sizes.values()))
        results.add(total, whole, **vars(case), stage=ALL, launches=launches)
        for name, size in sizes.items():
            share = whole - _timed(layers, names - {name})
            results.add(
                round(size),
                _timed(layers, {name}),
                **vars(case),
                stage=name,
                share_us=round(share, 3),
            )
        results.save()
        del layers, everything
        torch.cuda.empty_cache()


def text_table(rows: Rows) -> str:
    """Microseconds of each stage, alone and as its share of the layer."""
    lines = [f"{'':<24}{'share us':>10}{'alone us':>10}{'percent':>9}"]
    for row in rows:
        if row["stage"] == ALL:
            kind = "sliding" if row["sliding"] else "full"
            label = f"{kind} {row['context']} batch {row['batch']}"
            lines.append(
                f"{label:<24}{row['us']:>10.2f}{'':>10}{row['percent']:>9.0f}"
                f"  {row['launches']} launches"
            )
        else:
            lines.append(
                f"  {row['stage']:<22}{row['share_us']:>10.2f}{row['us']:>10.2f}"
                f"{row['percent']:>9.0f}"
            )
    return "\n".join(lines)
