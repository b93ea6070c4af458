# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's attention beside Flint's decode kernel, which takes sinks in FP32."""

from typing import Any

import torch

from vllm.model_executor.layers.attention import Attention


class BackendAttention(Attention):
    """Attention whose backend gets the layer's sinks in the dtype that it takes.

    FlashAttention takes the model's dtype only. Its copy is a buffer, so an engine that
    sleeps keeps it, and it follows the sinks when weights are loaded again.
    """

    # A tuple, because the sinks are another module's parameter.
    _exact_sinks: tuple[torch.Tensor, ...] = ()
    _rounded_sinks: torch.Tensor

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.attn_backend.get_name() != "FLASH_ATTN":
            return
        impl: Any = self.impl
        if not self._exact_sinks:
            if impl.sinks.dtype == act_dtype:
                return
            self._exact_sinks = (impl.sinks,)
            copy = torch.empty_like(impl.sinks, dtype=act_dtype)
            self.register_buffer("_rounded_sinks", copy, persistent=False)
            impl.sinks = self._rounded_sinks
        # In place: CUDA graphs have its address.
        self._rounded_sinks.copy_(self._exact_sinks[0])
