# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Other ways to run the same layers: what vLLM's backends call."""

import functools

import torch
from vllm.models.flint.ops.decode_attention import (
    DecodeWorkspace,
    flint_decode_attention,
)
from vllm.models.flint.ops.device import current_gpu

from attentionbench.problems import HEAD_DIM, HEADS, KV_HEADS, PAGE, Case, Inputs

SCALE = HEAD_DIM**-0.5


@functools.cache
def _zeros(n_bytes: int, use: str) -> torch.Tensor:
    """Memory that launches in one stream share, one buffer for each use."""
    return torch.zeros(n_bytes, dtype=torch.uint8, device="cuda")


@functools.cache
def _workspace(batch: int) -> DecodeWorkspace:
    gpu = torch.device("cuda", torch.cuda.current_device())
    return DecodeWorkspace(batch, KV_HEADS, current_gpu().sms, gpu)


class Contender:
    """One way to compute a layer; `__call__` fills the inputs' `out`.

    Attributes:
        name: As it stands in tables.
    """

    name: str

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case, self.inputs = case, inputs
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def __call__(self) -> None:
        raise NotImplementedError

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, page, KV heads, 128] each, as the backends split the cache."""
        k, v = self.inputs.kv_cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
        return k, v


class Ours(Contender):
    """As Flint's layers call it."""

    name = "ours"
    early_reads = True

    def prepare(self) -> None:
        self._workspace = _workspace(self.case.batch)

    def __call__(self) -> None:
        x = self.inputs
        flint_decode_attention(
            x.q,
            x.kv_cache,
            x.block_tables,
            x.seq_lens,
            x.sinks,
            self.case.window,
            SCALE,
            x.out,
            workspace=self._workspace,
            early_reads=self.early_reads,
        )


class OursAfterWait(Ours):
    """The same, reading nothing before the previous kernel has ended."""

    name = "ours_wait"
    early_reads = False


class FlashAttention3(Contender):
    """As vLLM's FLASH_ATTN backend calls it, with scheduler metadata made before."""

    name = "fa3"

    def prepare(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        x, batch = self.inputs, self.case.batch
        self._attend = flash_attn_varlen_func
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        window = self.case.window
        self._window = [-1, -1] if window is None else [window - 1, 0]
        self._sinks = x.sinks.bfloat16()
        self._metadata = get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=1,
            max_seqlen_k=self.case.context,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=HEAD_DIM,
            cache_seqlens=x.seq_lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self._starts,
            page_size=PAGE,
            causal=True,
            window_size=tuple(self._window),
        )

    def __call__(self) -> None:
        x = self.inputs
        k, v = self.keys_values()
        self._attend(
            q=x.q,
            k=k,
            v=v,
            out=x.out,
            cu_seqlens_q=self._starts,
            max_seqlen_q=1,
            seqused_k=x.seq_lens,
            max_seqlen_k=self.case.context,
            softmax_scale=SCALE,
            causal=True,
            window_size=self._window,
            block_table=x.block_tables,
            scheduler_metadata=self._metadata,
            fa_version=3,
            s_aux=self._sinks,
        )


class FlashInferXqa(Contender):
    """As vLLM's FLASHINFER backend calls it on Hopper, where sinks mean XQA."""

    name = "flashinfer"

    def prepare(self) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        self._attend = xqa_batch_decode_with_kv_cache
        self._workspace = _zeros(394 << 20, "xqa")

    def __call__(self) -> None:
        x, window = self.inputs, self.case.window
        self._attend(
            query=x.q,
            kv_cache=self.keys_values(),
            workspace_buffer=self._workspace,
            block_tables=x.block_tables,
            seq_lens=x.seq_lens,
            max_seq_len=self.case.context,
            bmm1_scale=SCALE,
            bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1,
            out=x.out,
            sinks=x.sinks,
            kv_layout="NHD",
            q_len_per_req=1,
        )


class Triton(Contender):
    """As vLLM's TRITON_ATTN backend calls its unified kernel."""

    name = "triton"
    _SEGMENTS = 16

    def prepare(self) -> None:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        batch = self.case.batch
        self._attend = unified_attention
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self._threshold = 128 // KV_HEADS
        shape = (self._threshold, HEADS, self._SEGMENTS)
        n_bytes = 4 * shape[0] * shape[1] * shape[2]
        parts = (_zeros(n_bytes, name).view(torch.float32) for name in ("max", "sum"))
        self._max, self._sum = (part.view(shape) for part in parts)
        out = _zeros(n_bytes * HEAD_DIM, "out").view(torch.float32)
        self._out = out.view(*shape, HEAD_DIM)

    def __call__(self) -> None:
        x, window = self.inputs, self.case.window
        k, v = self.keys_values()
        self._attend(
            q=x.q,
            k=k,
            v=v,
            out=x.out,
            cu_seqlens_q=self._starts,
            max_seqlen_q=1,
            seqused_k=x.seq_lens,
            max_seqlen_k=self.case.context,
            softmax_scale=SCALE,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=x.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=self._threshold,
            num_par_softmax_segments=self._SEGMENTS,
            softmax_segm_output=self._out,
            softmax_segm_max=self._max,
            softmax_segm_expsum=self._sum,
            sinks=x.sinks,
        )


CONTENDERS: dict[str, type[Contender]] = {
    c.name: c for c in (Ours, OursAfterWait, FlashAttention3, Triton, FlashInferXqa)
}
