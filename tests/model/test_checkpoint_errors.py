# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What a user sees of a checkpoint that cannot be served."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.models.flint import model as model_module
from vllm.models.flint.checkpoint import CheckpointTracker, expected_tensors
from vllm.models.flint.configs import FlintConfig
from vllm.models.flint.errors import FlintCheckpointError
from vllm.models.flint.model import FlintForCausalLM
from vllm.models.flint.ops.linear import check_merged_global_scales

from support.engine import EngineError, Pass, run_engine
from tinymodel import SPECS, write_gguf, write_safetensors
from tinymodel.specs import config_json

TINY = SPECS["tiny"]
CONFIG = FlintConfig(**config_json(TINY))


def serve(model: Path, config: Path) -> subprocess.CompletedProcess[str]:
    options = ["--hf-config-path", str(config), "--tokenizer", str(config)]
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *options],
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("vllm: error:")]
    assert len(errors) == 1 and message in errors[0]
    assert output.rstrip().endswith(errors[0])


def test_serve_truncated_gguf(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "bf16", TINY, 0, "nvfp4")
    write_gguf(tmp_path / "model.gguf", TINY, 0, "nvfp4")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: len(data) // 2])
    done = serve(tmp_path / "model.gguf", tmp_path / "bf16")
    assert_one_line(done, "it ends too early")


def test_serve_contradicting_config(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "bf16", TINY, 0, "bf16")
    config = config_json(TINY) | {"no_rope_layer_indices": [0]}
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    done = serve(tmp_path / "bf16", tmp_path / "bf16")
    assert_one_line(done, "contradicts layer_types")


def test_serve_folder_with_two_ggufs(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "bf16", TINY, 0, "nvfp4")
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / "two" / name, TINY, 0, "nvfp4")
    done = serve(tmp_path / "two", tmp_path / "bf16")
    assert_one_line(done, "has 2 GGUF files (a.gguf, b.gguf)")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            "tensors are missing: model.layers.1.self_attn.k_proj.weight; download",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64)}),
            "model.norm.weight has shape [64], but the config asks for [128]",
        ),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), "extra"),
    ],
    ids=["missing", "shape", "unknown"],
)
def test_engine_refuses_safetensors(tmp_path: Path, edit, message: str) -> None:
    model = tmp_path / "bf16"
    write_safetensors(model, TINY, 0, "bf16")
    file = model / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    with pytest.raises(EngineError) as error:
        run_engine([Pass([[5, 6, 7]])], model=str(model))
    assert message in str(error.value)


def whole() -> dict[str, torch.Tensor]:
    return {name: torch.empty(s) for name, s in expected_tensors(CONFIG).items()}


def test_tracker_accepts_the_whole_checkpoint() -> None:
    tracker = CheckpointTracker(CONFIG)
    assert len(list(tracker.check(whole().items()))) == len(whole())
    tracker.finish()


def test_tracker_accepts_dummy_weights_and_later_updates() -> None:
    tracker = CheckpointTracker(CONFIG)
    tracker.finish()
    update = {"model.norm.weight": torch.ones(128)}
    assert dict(tracker.check(update.items())).keys() == update.keys()
    tracker.finish()


def test_tracker_knows_modelopts_tensors() -> None:
    """Codes hold two values a byte; scales may be without a dimension."""
    tracker = CheckpointTracker(CONFIG)
    name = "model.layers.0.self_attn.o_proj.weight"
    n, k = expected_tensors(CONFIG)[name]
    codes = torch.zeros(n, k // 2, dtype=torch.uint8)
    given = {name: codes, f"{name}_scale_2": torch.tensor(0.5)}
    assert dict(tracker.check(given.items())).keys() == given.keys()
    with pytest.raises(FlintCheckpointError, match="config asks for"):
        list(tracker.check([(name, codes[:, 1:])]))
    with pytest.raises(FlintCheckpointError, match="config asks for"):
        list(tracker.check([(name, torch.tensor(0.5))]))


@pytest.mark.parametrize("absent", ["", "_scale", "_scale_2"])
def test_tracker_misses_scales_of_codes(absent: str) -> None:
    """In whatever order they come; other weights have none."""
    codes = [name for name in whole() if name.endswith("_proj.weight")]
    given = whole()
    for name in codes:
        n, k = given[name].shape
        given[name] = torch.zeros(n, k // 2, dtype=torch.uint8)
        scales = torch.zeros(n, k // 16), torch.tensor(0.5)
        given |= dict(zip((f"{name}_scale", f"{name}_scale_2"), scales, strict=True))
    if absent:
        del given[codes[7] + absent]
    for order in (list(given), list(reversed(given))):
        tracker = CheckpointTracker(CONFIG)
        list(tracker.check((name, given[name]) for name in order))
        if not absent:
            tracker.finish()
            continue
        with pytest.raises(FlintCheckpointError, match=f"missing: {codes[7]}{absent};"):
            tracker.finish()


def test_loads_refuse_unequal_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ModelOpt's safetensors as well, where vLLM would take the greater one."""

    class Loader:
        def __init__(self, module: Any) -> None: ...

        def load_weights(self, weights: Any, mapper: Any) -> set[str]:
            return {name for name, _ in weights}

    monkeypatch.setattr(model_module, "AutoWeightsLoader", Loader)
    loaded: Any = SimpleNamespace(
        _checkpoint=CheckpointTracker(CONFIG), hf_to_vllm_mapper=None
    )
    prefix = "model.layers.0.self_attn"
    given = [(f"{prefix}.{p}_proj.weight_scale_2", torch.tensor(0.5)) for p in "qk"]
    assert len(FlintForCausalLM.load_weights(loaded, given)) == 2
    given.append((f"{prefix}.v_proj.weight_scale_2", torch.tensor(0.25)))
    with pytest.raises(ValueError, match="need one global scale"):
        FlintForCausalLM.load_weights(loaded, given)


@pytest.mark.parametrize(
    ("quantization", "described", "finished"),
    [
        (None, False, True),
        ("modelopt_mixed", True, True),
        # Made from BF16 by the engine, and from what another tool wrote.
        ("fp8", False, True),
        ("fp8", True, False),
    ],
)
def test_absent_tensors_are_missed(
    quantization: str | None, described: bool, finished: bool
) -> None:
    calls: list[bool] = []
    quant = None
    if quantization is not None:
        quant = SimpleNamespace(get_name=lambda: quantization)
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(layers=()),
        quant_config=quant,
        config=SimpleNamespace(quantization_config={} if described else None),
        _skips_experts=True,
        _checkpoint=SimpleNamespace(finish=lambda skip_experts: calls.append(True)),
    )
    FlintForCausalLM.process_weights_after_loading(loaded)
    assert calls == [True] * finished


def test_tracker_names_a_few_of_many() -> None:
    tracker = CheckpointTracker(CONFIG)
    list(tracker.check([("model.norm.weight", torch.ones(128))]))
    with pytest.raises(FlintCheckpointError, match=r"lm_head.weight, .* and \d+ more;"):
        tracker.finish()


def test_tracker_skips_other_ranks_experts() -> None:
    tracker = CheckpointTracker(CONFIG)
    mine = {n: t for n, t in whole().items() if ".mlp.experts." not in n}
    list(tracker.check(mine.items()))
    tracker.finish(skip_experts=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("self_attn.q_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"),
    ],
)
def test_merged_global_scales(first: str, second: str) -> None:
    def scales(*values: float):
        names = (first, second, "self_attn.o_proj", "mlp.experts.4.gate_proj")
        for name, value in zip(names, (*values, 7.0, 8.0), strict=True):
            yield f"model.layers.0.{name}.weight_scale_2", torch.tensor([value])

    assert list(check_merged_global_scales(scales(0.5, 0.5))) == list(scales(0.5, 0.5))
    with pytest.raises(ValueError) as error:
        list(check_merged_global_scales(scales(0.5, 0.25)))
    for part in (f"{first}.weight_scale_2 is 0.5", f"{second}.weight_scale_2 is 0.25"):
        assert part in str(error.value)
