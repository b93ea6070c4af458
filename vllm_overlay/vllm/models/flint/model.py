# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Inference-only Flint on vLLM's stock layers, and on its own kernels where they run.

Runs on every platform that vLLM supports. Stock layers depart from the exact
arithmetic of Flint's kernels in the last bits, at BF16 only: the RoPE table and the
sinks are rounded to the model's dtype, the routing weights stay FP32, and a stock
NVFP4 head rounds its logits to BF16.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn

from vllm import envs
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    spec_decode_needs_target_embed,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from .attention import FlintAttention
from .checkpoint import CheckpointTracker
from .kernel_switch import norm_class, why_off
from .mlp import FlintMLP, FlintSparseMoeBlock
from .ops.compile_key import tell_compile_cache
from .ops.global_scales import check_merged_global_scales
from .ops.linear import install_flint_dense_kernels
from .ops.moe import make_route_counter
from .patchset import require_patches

logger = init_logger(__name__)

__all__ = [
    "FlintAttention",
    "FlintDecoderLayer",
    "FlintForCausalLM",
    "FlintMLP",
    "FlintModel",
    "FlintSparseMoeBlock",
]


class FlintDecoderLayer(nn.Module):
    """Pre-norm attention and MLP (dense or sparse) around a residual stream."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        self.self_attn = FlintAttention(
            config,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp: FlintMLP | FlintSparseMoeBlock
        if extract_layer_index(prefix) in config.mlp_only_layers:
            self.mlp = FlintMLP(
                config.hidden_size,
                config.intermediate_size,
                quant_config=quant_config,
                prefix=f"{prefix}.mlp",
            )
        else:
            self.mlp = FlintSparseMoeBlock(vllm_config, prefix=f"{prefix}.mlp")
        norm = norm_class(vllm_config)
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            positions: Position of each token, [num_tokens] int64.
            hidden_states: The last block's output, [num_tokens, hidden_size].
            residual: The residual stream before it, or None in the first layer.

        Returns:
            This layer's MLP output and the residual stream before it.

        """
        if self.self_attn.uses_kernels:
            if residual is None:
                residual = torch.zeros_like(hidden_states)
            hidden_states, residual = self.self_attn.forward_fused(
                positions, hidden_states, residual, self.input_layernorm
            )
        else:
            if residual is None:
                residual = hidden_states
                hidden_states = self.input_layernorm(hidden_states)
            else:
                hidden_states, residual = self.input_layernorm(hidden_states, residual)
            hidden_states = self.self_attn(positions, hidden_states)
        norm = self.post_attention_layernorm
        if isinstance(self.mlp, FlintSparseMoeBlock) and self.mlp.uses_kernels:
            return self.mlp.forward_fused(hidden_states, residual, norm)
        hidden_states, residual = norm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@support_torch_compile
class FlintModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens: nn.Module = PPMissingLayer()
        is_first = get_pp_group().is_first_rank
        if is_first or spec_decode_needs_target_embed(vllm_config):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                prefix=f"{prefix}.embed_tokens",
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: FlintDecoderLayer(vllm_config, prefix=prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = norm_class(vllm_config)(config.hidden_size, eps=config.rms_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up [num_tokens] token ids as [num_tokens, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this pipeline stage; see `FlintForCausalLM.forward`."""
        residual: torch.Tensor | None
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            hidden_states = inputs_embeds
            residual = None
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors(
                {"hidden_states": hidden_states, "residual": residual}
            )
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class FlintForCausalLM(nn.Module, SupportsPP, SupportsQuant):
    """Flint with its language-model head."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_suffix={
            ".self_attn.softmax_offset": ".self_attn.sinks",
        },
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
            ".shared_expert.gate_proj": (".shared_expert.gate_up_proj", 0),
            ".shared_expert.up_proj": (".shared_expert.gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        require_patches()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.quant_config = vllm_config.quant_config
        self.model = FlintModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = (
            self.model.make_empty_intermediate_tensors
        )
        off = why_off(vllm_config, "linears")
        if current_platform.is_cuda():
            tell_compile_cache(vllm_config)
        if off is None:
            self._take_flint_linears()
        else:
            logger.info_once("Flint's dense kernels are not used: %s", off)
        self._checkpoint = CheckpointTracker(config)
        parallel_config = vllm_config.parallel_config
        self._skips_experts = (
            parallel_config.enable_expert_parallel
            and parallel_config.enable_ep_weight_filter
        )

    def _take_flint_linears(self) -> None:
        unquantized = UnquantizedEmbeddingMethod, UnquantizedLinearMethod
        if (
            current_platform.is_cuda()
            and not envs.VLLM_BATCH_INVARIANT
            and isinstance(getattr(self.lm_head, "quant_method", None), unquantized)
        ):
            # BF16 operands, FP32 logits: no copy of the head, unlike elsewhere.
            self.logits_processor.head_dtype = torch.float32
        install_flint_dense_kernels(self)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up [num_tokens] token ids as [num_tokens, hidden_size]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this rank's layers.

        Args:
            input_ids: Token ids, [num_tokens] int32 or int64.
            positions: Position of each token, [num_tokens] int64.
            intermediate_tensors: The previous pipeline stage's output.
            inputs_embeds: Embeddings to use in place of `input_ids`.

        Returns:
            Normed hidden states, [num_tokens, hidden_size], on the last pipeline
            rank; what the next stage needs on the others.

        """
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Map [num_tokens, hidden_size] to [num_tokens, vocab_size]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors under the checkpoint's names.

        Args:
            weights: Pairs of a name as in Flint's safetensors and its tensor.

        Returns:
            Names of the parameters that were set.

        Raises:
            ValueError: A tensor is unknown or has the wrong shape, or the shards of a
                fused linear have unequal global scales.

        """
        loader = AutoWeightsLoader(self)
        checked = check_merged_global_scales(self._checkpoint.check(weights))
        return loader.load_weights(checked, mapper=self.hf_to_vllm_mapper)

    def _keep_asleep(self, name: str, counters: torch.Tensor) -> None:
        """Let an engine that sleeps wake up with counters that kernels left at zero.

        Sleep of level 2 gives up all memory that was allocated with the weights, but
        for buffers, which it keeps on the host.
        """
        self.register_buffer(name, counters, persistent=False)

    def process_weights_after_loading(self) -> None:
        """Refuse a checkpoint that left weights unset, and prepare the kernels."""
        # Other pipeline stages' layers are placeholders.
        layers = [x for x in self.model.layers if isinstance(x, FlintDecoderLayer)]
        # Layers run one after the other, so one workspace serves them all; it is this
        # engine's own, since another one's launches may run at the same time.
        decoding = next((x.self_attn for x in layers if x.self_attn.decodes), None)
        workspace = None if decoding is None else decoding.new_workspace()
        if workspace is not None:
            self._keep_asleep("attention_counters", workspace.counters)
        for layer in layers:
            eps = layer.input_layernorm.variance_epsilon
            layer.self_attn.prepare_kernels(eps, workspace)
        sparse = [x.mlp for x in layers if isinstance(x.mlp, FlintSparseMoeBlock)]
        if any(block.uses_kernels for block in sparse):
            counter = make_route_counter(self.model.norm.weight.device)
            self._keep_asleep("route_counters", counter)
            for block in sparse:
                block.prepare_kernels(counter)
        # Checkpoints that others than ModelOpt quantized have names of their own.
        quant = self.quant_config
        is_unquantized = getattr(self.config, "quantization_config", None) is None
        if is_unquantized or quant is None or quant.get_name().startswith("modelopt"):
            self._checkpoint.finish(skip_experts=self._skips_experts)
