# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The engine benchmark without a GPU: weights, clock, files, table and plot."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from enginebench import measure, one
from enginebench.engines import ENGINES, POINTS
from enginebench.models import (
    FLINT,
    kv_cache_bytes,
    nvfp4_modules,
    weight_bytes,
    write_config,
)
from enginebench.plot import svg
from enginebench.results import add_engine, read_comparison
from enginebench.table import markdown
from tinymodel.specs import SPECS

E4M3 = torch.float8_e4m3fn


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    data = torch.zeros(shape, dtype=torch.float32).to(dtype)
    return torch.nn.Parameter(data, requires_grad=False)


def layer(**parameters: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, value)
    return module


def nvfp4_layer(prefix: str, *shape: int) -> torch.nn.Module:
    *outer, k = shape
    return layer(
        **{
            f"{prefix}weight": parameter(*outer, k // 2, dtype=torch.uint8),
            f"{prefix}weight_scale": parameter(*outer, k // 16, dtype=E4M3),
            f"{prefix}weight_scale_2": parameter(outer[0], dtype=torch.float32),
        }
    )


def rms(module: torch.nn.Module, prefix: str = "") -> float:
    """Of the dequantized weight times the square root of its width."""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = getattr(module, f"{prefix}weight")
    scales = getattr(module, f"{prefix}weight_scale").float()
    values = e2m1[(codes & 7).long()].square().mean() * scales.square().mean()
    scale_2 = getattr(module, f"{prefix}weight_scale_2")
    return (values.sqrt() * scale_2[0] * (2 * codes.shape[-1]) ** 0.5).item()


class TestWeights:
    def fill(self, **modules: torch.nn.Module) -> None:
        from enginebench.synthetic import fill_weights

        fill_weights(torch.nn.ModuleDict(modules))

    def test_every_code_and_scale_is_random_and_finite(self):
        module = nvfp4_layer("", 256, 512)
        self.fill(qkv_proj=module)
        assert len(module.weight.unique()) == 256
        scales = module.weight_scale.float()
        assert scales.isfinite().all()
        assert scales.min() >= 1 and scales.max() < 4 and len(scales.unique()) == 16
        assert rms(module) == pytest.approx(1.0, rel=0.2)

    def test_what_goes_to_the_residual_stream_is_small(self):
        inner = nvfp4_layer("w13_", 4, 64, 128)
        outer = nvfp4_layer("w2_", 4, 128, 32)
        self.fill(gate_up_proj=inner, experts=outer)
        assert rms(inner, "w13_") == pytest.approx(1.0, rel=0.2)
        assert rms(outer, "w2_") == pytest.approx(0.1, rel=0.2)

    def test_bf16(self):
        router = layer(weight=parameter(64, 256))
        norm = layer(weight=parameter(256))
        embed = layer(weight=parameter(64, 256))
        self.fill(gate=router, norm=norm, embed_tokens=embed)
        assert router.weight.float().std() == pytest.approx(1 / 16, rel=0.1)
        assert embed.weight.float().std() == pytest.approx(1.0, rel=0.1)
        assert 0.5 <= norm.weight.min() < norm.weight.max() <= 1.0

    def test_experts_of_tokens_differ(self):
        router = layer(weight=parameter(256, 2048))
        self.fill(gate=router)
        x = torch.randn(64, 2048)
        chosen = (x @ router.weight.float().T).topk(6).indices
        assert len(chosen.unique()) > 150

    def test_a_type_that_no_weight_has_is_an_error(self):
        with pytest.raises(ValueError, match=r"odd\.weight is torch\.int32"):
            self.fill(odd=layer(weight=parameter(4, dtype=torch.int32)))


class TestConfig:
    def test_flint_has_its_full_layers(self):
        full = [i for i, kind in enumerate(FLINT.layer_types) if "full" in kind]
        assert len(FLINT.layer_types) == 49 and len(full) == 14

    def test_nvfp4_quantizes_every_matrix_and_the_head(self, tmp_path: Path):
        config = write_config(tmp_path, SPECS["tiny"], nvfp4=True)
        layers = config["quantization_config"]["quantized_layers"]
        assert {"lm_head", "model.layers.2.mlp.experts"} <= set(layers)
        assert "model.layers.2.mlp.gate" not in layers
        assert {v["quant_algo"] for v in layers.values()} == {"W4A16_NVFP4"}
        assert json.loads((tmp_path / "config.json").read_text()) == config

    def test_vllm_reads_it(self):
        from vllm.model_executor.layers.quantization.modelopt import (
            ModelOptMixedPrecisionConfig,
        )
        from vllm.models.flint.gguf_config import quantization_config

        modules = nvfp4_modules(FLINT)
        config = ModelOptMixedPrecisionConfig.from_config(quantization_config(modules))
        assert set(config.quantized_layers) == modules

    def test_bf16_is_not_quantized(self, tmp_path: Path):
        assert "quantization_config" not in write_config(tmp_path, FLINT, nvfp4=False)

    def test_kv_cache_of_sliding_layers_stops_at_the_window(self):
        one_more = kv_cache_bytes(FLINT, 1, 2049) - kv_cache_bytes(FLINT, 1, 2048)
        assert one_more == 14 * 2048

    def test_engine_has_room_for_every_point(self, tmp_path: Path):
        for points in POINTS.values():
            options = one.llm_options(ENGINES["off"], points, tmp_path, {"seed": 1})
            assert options["max_num_seqs"] == 128 and options["seed"] == 1
            for batch, context in points.decode:
                new = measure.max_new_tokens(batch, context)
                assert context + new <= options["max_model_len"]

    def test_weights_are_those_of_the_model(self):
        # 37.9e9 values of experts and 0.6e9 of embedding and head, above all.
        assert weight_bytes(FLINT, nvfp4=False) == pytest.approx(2 * 40e9, rel=0.05)
        assert weight_bytes(FLINT, nvfp4=True) == pytest.approx(23e9, rel=0.05)

    def test_kv_cache_of_an_engine_among_others(self):
        def option(share: float, **more: Any) -> dict[str, Any]:
            options = {"gpu_memory_utilization": share} | more
            return one.kv_cache_option(options, FLINT, True, 140 << 30)

        third = option(0.3)["kv_cache_memory_bytes"]
        assert 10 << 30 < third < 20 << 30
        assert option(0.9)["kv_cache_memory_bytes"] - third == pytest.approx(84 << 30)
        assert option(0.3, kv_cache_memory_bytes=5) == {}
        with pytest.raises(SystemExit, match="14 GiB of the GPU are too few"):
            option(0.1)


class StandInEngine:
    """Prefills one request a step, and gives the others a token each."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 1000)

    def __init__(self, most: int = 1 << 30, seconds: float = 0.002) -> None:
        self.most, self.seconds = most, seconds
        self.left: dict[str, int] = {}
        self.waiting: list[str] = []
        self.late = False

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        self.left[name] = params.max_tokens
        self.waiting.append(name)
        return name

    def abort_request(self, names: list[str], internal: bool) -> None:
        self.left = {n: k for n, k in self.left.items() if n not in names}
        self.waiting = [n for n in self.waiting if n not in names]
        self.late = True

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        if self.late:
            self.late = False
            return []
        time.sleep(self.seconds)
        if self.waiting and len(self.left) - len(self.waiting) < self.most:
            self.waiting.pop(0)
        outputs = []
        for name in [n for n in self.left if n not in self.waiting]:
            self.left[name] -= 1
            outputs.append(SimpleNamespace(finished=self.left[name] == 0))
        self.left = {n: k for n, k in self.left.items() if k}
        return outputs


class TestClock:
    def test_counts_only_steps_of_the_whole_batch(self):
        engine = StandInEngine()
        llm = SimpleNamespace(llm_engine=engine)
        seconds = measure.time_per_output_token(llm, 8, 16)
        assert 0.002 <= seconds < 0.008
        assert not engine.left

    def test_a_point_follows_another(self):
        llm = SimpleNamespace(llm_engine=StandInEngine(seconds=0.0001))
        for batch in (1, 4):
            assert measure.time_per_output_token(llm, batch, 16) > 0

    def test_a_batch_that_does_not_fit_is_an_error(self):
        llm = SimpleNamespace(llm_engine=StandInEngine(most=4, seconds=0.0))
        with pytest.raises(measure.PointError):
            measure.time_per_output_token(llm, 8, 16)

    def test_first_token(self):
        llm = SimpleNamespace(llm_engine=StandInEngine(seconds=0.003))
        assert 0.003 <= measure.time_to_first_token(llm, 64) < 0.02

    def test_run_saves_each_point_and_skips_what_does_not_fit(self, tmp_path: Path):
        llm = SimpleNamespace(
            llm_engine=StandInEngine(seconds=0.0001),
            collective_rpc=lambda name: [[(1.5, 0.1), (2.5, 0.3), (2.5, 0.2)]],
        )
        points = POINTS["quick"]
        run = one.Run(tmp_path / "r.json", FLINT, points, {"memory": {"kv_cache": 1e9}})
        run.measure(llm)
        saved = json.loads(run.path.read_text())
        graph = saved["cuda_graph"]
        assert (graph["ms"], graph["host_ms"]) == (2.5, 0.2)
        assert [r["prompt"] for r in saved["time_to_first_token"]] == [128, 1024, 8192]
        timed = {(r["batch"], r["context"]) for r in saved["time_per_output_token"]}
        left_out = {(r["batch"], r["context"]) for r in saved["skipped"]}
        assert timed | left_out == set(points.decode) and not timed & left_out
        assert (1, 100000) in left_out and (8, 1024) in timed


def engine_result(ms: float) -> dict[str, Any]:
    rows = [
        {"context": c, "batch": b, "ms": ms * b}
        for b, c in ((1, 1024), (2, 1024), (1, 128), (1, 32768))
    ]
    return {
        "time_per_output_token": rows,
        "time_to_first_token": [{"prompt": 128, "ms": 3 * ms}],
        "memory": {"weights": 24 << 30, "kv_cache": 90 << 30},
        "startup_s": 61.2,
    }


class TestFiles:
    def test_engines_are_added_and_replaced(self, tmp_path: Path):
        path = tmp_path / "x.json"
        for name, ms in (("flint", 1.0), ("off", 2.0), ("flint", 0.5)):
            add_engine(path, "nvfp4", name, engine_result(ms))
        engines = read_comparison(path, "nvfp4")["engines"]
        assert engines["flint"]["time_per_output_token"][0]["ms"] == 0.5
        assert list(engines) == ["flint", "off"]
        assert [p.name for p in tmp_path.iterdir()] == ["x.json"]

    def test_a_failed_run_does_not_take_what_was_measured(self, tmp_path: Path):
        path = tmp_path / "x.json"
        add_engine(path, "nvfp4", "flint", engine_result(1.0))
        for name in ("flint", "off"):
            add_engine(path, "nvfp4", name, {"error": "failed"})
        engines = read_comparison(path, "nvfp4")["engines"]
        assert engines["flint"] == engine_result(1.0)
        assert engines["off"] == {"error": "failed"}

    def test_another_file_is_refused(self, tmp_path: Path):
        path = tmp_path / "x.json"
        path.write_text('{"weights": "nvfp4"}')
        with pytest.raises(ValueError, match="name another"):
            read_comparison(path, "nvfp4")

    def test_table_marks_the_fastest_and_says_what_failed(self):
        failed = {"error": "failed with exit code 1"}
        engines = {"flint": engine_result(1.0), "off": engine_result(2.0)}
        graph = {"context": 1024, "batch": 1, "ms": 2.5}
        engines["flint"]["cuda_graph"] = graph | {"host_ms": 0.2}
        engines["off"]["cuda_graph"] = graph | {"ms": 5.0}
        text = markdown({"engines": engines | {"stock-marlin": failed}})
        lines = text.splitlines()
        assert lines[0] == "|  | Flint's kernels | kernels off | stock, Marlin |"
        assert "| ms a token, context 1024, batch 2 | **2** | 4 | - |" in lines
        assert "| ms to first token, prompt 128 | **3** | 6 | - |" in lines
        assert "| host ms to launch it | **0.2** | - | - |" in lines
        assert "| GiB of weights | 24.0 | 24.0 | - |" in lines
        assert lines[-1] == "stock, Marlin: failed with exit code 1"
        assert "same time" not in text

    def test_table_says_what_started_together(self):
        engines = {name: engine_result(1.0) for name in ("flint", "off")}
        engines["off"]["started_together"] = True
        note = "Started at the same time, which takes longer: kernels off"
        assert markdown({"engines": engines}).splitlines()[-1] == note

    def test_plot_has_a_line_for_each_engine(self):
        engines = {"flint": engine_result(1.0), "off": engine_result(2.0)}
        root = ElementTree.fromstring(svg({"engines": engines}))
        space = "{http://www.w3.org/2000/svg}"
        # Two panels: context 1024 over the batch, and batch 1 over the context.
        assert len(root.findall(f"{space}g")) == 2
        lines = list(root.iter(f"{space}polyline"))
        assert [len(line.attrib["points"].split()) for line in lines] == [2, 2, 3, 3]


def test_what_a_worker_says_of_its_machine_travels_to_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What vLLM cannot encode ends the engine's output without a word."""
    from vllm.v1.serial_utils import MsgpackEncoder

    from enginebench import synthetic

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = synthetic.BenchWorker().bench_machine()
    assert found["torch"].startswith("2.")
    MsgpackEncoder().encode(found)
