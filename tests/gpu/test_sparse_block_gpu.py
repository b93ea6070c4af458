# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A sparse block of Flint's width, from vLLM's loaders to its answer, with no engine.

The kernels' own tests hold each to the contract's roundings. This one shows that every
path, for any tokens, gives the contract's answer with the weights that vLLM loaded.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.models.flint.ops import moe_layer
from vllm.models.flint.ops.device import current_gpu
from vllm.models.flint.ops.linear import install_flint_dense_kernels
from vllm.models.flint.ops.moe import make_route_counter
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

from contract import ops
from contract.model import sparse_block
from contract.numerics import Numerics
from support.moe_layers import (
    PREFIX,
    load_block,
    make_block,
    one_rank,
    plain,
    sparse_weights,
)
from support.wide import WIDE
from tinymodel.specs import config_json

DEVICE = "cuda"
EPS = 1e-6
CONTRACT = Numerics.CONTRACT
# Each side of each switch between paths.
TOKENS = (1, 5, 16, 17, 32, 33, 64, 65, 100, 1000)
# A few values on the way may round the other way, by 2^-8 each; a lost or misplaced
# part of the sum is off by about 1.
RMS_BOUND, LARGEST_BOUND = 2.0**-7, 2.0**-5
# vLLM's own MoE also rounds what each expert adds, so one more value of a sum may.
VLLM_LARGEST_BOUND = 2 * LARGEST_BOUND
# Tokens whose last chosen and first left out logit are nearer are left out.
CLOSE = 2.0**-7


@pytest.fixture(autouse=True, scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # vLLM's own MoE takes its temporary memory from there.
    init_workspace_manager(torch.device(DEVICE))
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield
    reset_workspace_manager()


class Layer:
    """A loaded block, and what the contract says of it."""

    def __init__(self, quantized: bool, plain_shared: bool, packed: bool) -> None:
        self.quantized = quantized
        family = "nvfp4" if quantized else "bf16"
        weights = sparse_weights(WIDE, family, plain_shared)
        self.weights = {n: plain(w).double().to(DEVICE) for n, w in weights.items()}
        with torch.device(DEVICE):
            self.block, self.config = make_block(WIDE, quantized, plain_shared)
        assert self.block.uses_kernels
        install_flint_dense_kernels(self.block)
        load_block(self.block, weights)
        with pytest.MonkeyPatch.context() as patch:
            form = "mul" if packed else "cvt"
            patch.setattr(moe_layer, "decode_form", lambda: form)
            for module in self.block.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase):
                    method.process_weights_after_loading(module)
        self.block.prepare_kernels(make_route_counter(DEVICE))
        norm = torch.linspace(0.5, 1.5, WIDE.hidden_size, device=DEVICE).bfloat16()
        self.norm = SimpleNamespace(weight=norm, variance_epsilon=EPS)

    def run(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.block.add_norm_and_mix(x, residual, self.norm.weight, EPS)

    def check(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
        new_residual: torch.Tensor,
    ) -> None:
        is_own = len(x) <= self.block._method.max_decode_tokens or self.quantized
        bound = LARGEST_BOUND if is_own else VLLM_LARGEST_BOUND
        normed, total = ops.rms_norm(
            x.double(), self.norm.weight, EPS, CONTRACT, residual.double()
        )
        assert torch.equal(new_residual.double(), total)
        config = config_json(WIDE)
        wanted = sparse_block(self.weights, config, PREFIX, normed, CONTRACT)
        router = self.weights[f"{PREFIX}.gate.weight"]
        logits = ops.linear(normed, router, Numerics.EXACT)
        best = logits.topk(WIDE.num_experts_per_tok + 1, dim=-1).values
        gap = best[:, -2] - best[:, -1]
        clear = gap > CLOSE * best[:, -2:].abs().amax(-1)
        assert len(clear) <= 8 or clear.float().mean() > 0.5
        off = (out.double() - wanted)[clear]
        size = wanted[clear].square().mean(-1, keepdim=True).sqrt()
        rms = (off.square().mean(-1, keepdim=True).sqrt() / size).max().item()
        assert rms <= RMS_BOUND, f"off by {rms:.5f} of a token's rms"
        largest = (off.abs() / size).max().item()
        assert largest <= bound, f"a value is off by {largest:.5f} of the rms"


@functools.cache
def layer_of(kind: str) -> Layer:
    """NVFP4 all through, also packed; beside a BF16 shared expert; BF16 all through."""
    plain_shared = kind in ("mixed", "bf16")
    return Layer(kind != "bf16", plain_shared, packed=kind == "packed")


@pytest.fixture(params=["nvfp4", "packed", "mixed", "bf16"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return layer_of(request.param)


@pytest.fixture(autouse=True)
def poisoned_allocator(ranks: None) -> None:
    sizes = (65536, 1 << 21, 1 << 24)
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in sizes]
    del blocks


def tokens_of(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (2, count, WIDE.hidden_size)
    both = torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
    return both[0], both[1]


@pytest.mark.parametrize("tokens", TOKENS)
def test_answer(layer: Layer, tokens: int) -> None:
    """Through the operator, and twice, with the same bits."""
    given = tokens_of(tokens, tokens)
    found = []
    for _ in range(2):
        with set_forward_context(None, layer.config, num_tokens=tokens):
            found.append(layer.block.forward_fused(*given, layer.norm))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    layer.check(*given, *found[0])


@pytest.mark.skipif(
    current_gpu().capability != (9, 0), reason="the dense GEMV is tuned for SM90"
)
def test_the_shared_expert_joins(layer: Layer) -> None:
    """Where this fails, all of the above ran on the slower form."""
    assert layer.block._fused is not None


def test_no_tokens(layer: Layer) -> None:
    out, residual = layer.run(*tokens_of(0, 0))
    assert out.shape == residual.shape == (0, WIDE.hidden_size)


@pytest.mark.parametrize("tokens", [4, 16, 100])
@pytest.mark.parametrize("padding", [float("nan"), float("inf"), 1e38])
def test_padding_has_no_part_in_answers(
    layer: Layer, tokens: int, padding: float
) -> None:
    """What a CUDA graph's rows past the last token hold is what was there before."""
    real = tokens // 2
    x, residual = tokens_of(tokens, tokens)
    clean = [part[:real].clone() for part in layer.run(x, residual)]
    x[real:], residual[real:] = padding, padding
    dirty = [part[:real] for part in layer.run(x, residual)]
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, 8, 40, 100])
def test_replays_of_a_graph(layer: Layer, tokens: int) -> None:
    """One graph, tokens that choose other experts at each replay."""
    x, residual = tokens_of(tokens, 1)
    layer.run(x, residual)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(x, residual)
    for seed in (2, 3, 4):
        for place, value in zip((x, residual), tokens_of(tokens, seed), strict=True):
            place.copy_(value)
        graph.replay()
        got = [part.clone() for part in captured]
        for one, other in zip(got, layer.run(x, residual), strict=True):
            assert torch.equal(one, other)
