# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What runs inside an engine's worker: random weights, and its own measurements.

vLLM's dummy weights leave codes as the memory was, and scales near zero. Here every
code, scale and value is random and of a real model's size, so that no kernel reads
zeros and routers spread tokens over all experts.
"""

import time
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from provenance import machine

LOAD_FORMAT = "random-weights"
WORKER_EXTENSION = "enginebench.synthetic.BenchWorker"

# E4M3 bytes of 1 to 3.75; such scales times E2M1 codes have an rms of about 6.
_SCALES = (0x38, 0x48)
_RMS = 6.0
# What blocks add to the residual stream, so that tokens stay unlike each other over
# all layers, and with them their experts.
_OUTPUT_GAIN = 0.1
_OUTPUTS = (".o_proj", ".down_proj")
_SCALE_2 = "weight_scale_2"


def fill_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Sets every parameter to random values of a fixed seed.

    Raises:
        ValueError: If a parameter has a type that weights of Flint do not have.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            _fill(prefix, module, name, parameter.data, generators[device])


def _fill(
    prefix: str,
    module: torch.nn.Module,
    name: str,
    data: torch.Tensor,
    generator: torch.Generator,
) -> None:
    is_output = prefix.endswith(_OUTPUTS) or name.startswith("w2_")
    gain = _OUTPUT_GAIN if is_output else 1.0
    if data.dtype == torch.uint8:
        data.random_(0, 256, generator=generator)
    elif data.dtype == torch.float8_e4m3fn:
        data.view(torch.uint8).random_(*_SCALES, generator=generator)
    elif name.endswith(_SCALE_2):
        codes = getattr(module, name.removesuffix(_SCALE_2) + "weight")
        data.fill_(gain / _RMS / (2 * codes.shape[-1]) ** 0.5)
    elif name.endswith("input_scale"):
        data.fill_(1.0)
    elif not data.is_floating_point():
        raise ValueError(f"{prefix}.{name} is {data.dtype}: no weight of Flint is")
    elif name == "sinks":
        data.uniform_(0.0, 4.0, generator=generator)
    elif data.dim() == 1:
        data.uniform_(0.5, 1.0, generator=generator)
    elif "embed" in prefix:
        data.normal_(generator=generator)
    else:
        data.normal_(std=gain / data.shape[-1] ** 0.5, generator=generator)


@register_model_loader(LOAD_FORMAT)
class RandomWeightsLoader(DummyModelLoader):
    """Fills weights before vLLM gives them the form that its kernels read."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """See `fill_weights`."""
        fill_weights(model)


def _kv_cache_bytes(caches: Any) -> int:
    tensors = [x for cache in caches for x in _tensors(cache)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


class BenchWorker:
    """Methods that `LLM.collective_rpc` finds on vLLM's GPU worker."""

    model_runner: Any

    def bench_machine(self) -> dict[str, str]:
        """Describes the GPU and the versions."""
        return machine()

    def bench_memory(self) -> dict[str, int]:
        """Bytes of the weights, of the KV cache, and of all that the GPU holds."""
        free, total = torch.cuda.mem_get_info()
        return {
            "weights": int(self.model_runner.model_memory_usage),
            "kv_cache": _kv_cache_bytes(self.model_runner.kv_caches),
            "allocated": torch.cuda.memory_allocated(),
            "device": total - free,
        }

    def bench_record_graphs(self) -> None:
        """Starts to time every replay of a CUDA graph, on the GPU and on the host."""
        events: list[tuple[torch.cuda.Event, torch.cuda.Event, float]] = []
        original = torch.cuda.CUDAGraph.replay

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begun = time.perf_counter()
            original(graph)
            host = time.perf_counter() - begun
            end.record()
            events.append((start, end, host))

        self._bench_graphs = events, original
        torch.cuda.CUDAGraph.replay = replay

    def bench_graph_ms(self) -> list[tuple[float, float]]:
        """Stops that; returns each replay's milliseconds on the GPU and on the host."""
        events, torch.cuda.CUDAGraph.replay = self._bench_graphs
        torch.cuda.synchronize()
        return [(start.elapsed_time(end), 1e3 * host) for start, end, host in events]
