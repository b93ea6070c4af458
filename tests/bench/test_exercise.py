# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What is launched for compute-sanitizer, with stand-ins for the launches."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from vllm.models.flint.ops import (
    decode_attention,
    fragments,
    moe_gemv,
    norm,
    nvfp4_gemv,
    qk_norm_rope,
)
from vllm.models.flint.ops.attention.config import DecodeSpec
from vllm.models.flint.ops.attention.workspace import DecodeWorkspace
from vllm.models.flint.ops.device import Gpu
from vllm.models.flint.ops.experts import grouped, grouped_config, route

import attentionbench.cli
import attentionbench.exercise
import moebench.cli
import moebench.exercise
from attentionbench import sets as attention_sets
from attentionbench.problems import KV_HEADS
from gemvbench import exercise as parts
from gemvbench import sets as gemv_sets
from gemvbench.shapes import HIDDEN, Layer
from moebench import sets as moe_sets

SMS = attention_sets.SMS
CPU = torch.device("cpu")


class Launches(list):
    """Stands in for Triton kernels: keeps each launch's arguments."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self.append((grid, args, named))

    def kept(self) -> list[tuple]:
        return list(self)


@pytest.fixture(autouse=True)
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_attention, nvfp4_gemv, grouped_config):
        monkeypatch.setattr(module, "current_gpu", lambda: Gpu((9, 0), SMS))
    monkeypatch.setattr(fragments, "to_fragments", blank_fragments)


def blank_fragments(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the right shapes, without quack."""
    rows, columns = weight.shape[0] // 64, weight.shape[1] // 32
    return (
        weight.new_zeros((rows, columns, 128, 16)),
        weight.new_zeros((rows, columns, 32, 4, 2)),
    )


def recorder(seen: list[tuple]) -> Callable[..., Callable[..., None]]:
    """Takes the place of what compiles a variant."""
    return lambda *variant: lambda *args: seen.append((variant, args))


def stand_in(
    monkeypatch: pytest.MonkeyPatch, module: Any, *names: str
) -> dict[str, Launches]:
    """Replaces Triton kernels, which a CPU build of vLLM does not even define."""
    monkeypatch.setattr(module, "triton", triton)
    found = {name: Launches() for name in names}
    for name, launches in found.items():
        monkeypatch.setattr(module, name, launches)
    return found


class TestAttention:
    run = staticmethod(
        functools.partial(parts.run_parts, attentionbench.exercise.PARTS, device="cpu")
    )

    def test_every_served_decode_is_launched(self, monkeypatch: pytest.MonkeyPatch):
        seen: list[tuple] = []
        shared = DecodeWorkspace(256, KV_HEADS, SMS, CPU)
        monkeypatch.setattr(decode_attention, "decode_variant", recorder(seen))
        monkeypatch.setattr(
            decode_attention, "_shared_workspace", lambda device, heads: shared
        )
        self.run(["decode"], None)
        assert {variant for variant, _ in seen} == set(attention_sets.served())
        lengths = [args[3].tolist() for (spec, _), args in seen if spec == DecodeSpec()]
        assert any({0, 1, 513, 4000} <= set(batch) for batch in lengths)
        assert [4000] in lengths

    def test_every_form_of_the_fused_qkv_is_launched(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        seen: list[tuple] = []
        second = stand_in(monkeypatch, qk_norm_rope, "_qk_norm_rope_kernel")
        monkeypatch.setattr(nvfp4_gemv, "gemv_variant", recorder(seen))
        self.run(["qkv"], None)
        wanted = gemv_sets.normed(Layer(5120, HIDDEN), "mul", "sm90")
        assert {variant for variant, _ in seen} == set(wanted)
        kernels = second["_qk_norm_rope_kernel"].kept()
        assert {named["WAIT"] for _, _, named in kernels} == {True}
        assert {named["FP8"] for _, _, named in kernels} == {False, True}
        assert {grid[0] for grid, _, _ in kernels} == {1, 8, 13, 16}

    def test_the_second_half_meets_all_kinds_of_layers(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        seen = stand_in(monkeypatch, qk_norm_rope, "_qk_norm_rope_kernel")
        self.run(["qk_norm_rope"], None)
        names = "ROPE", "FP8", "HEADS"
        kinds = {
            tuple(named[name] for name in names)
            for _, _, named in seen["_qk_norm_rope_kernel"].kept()
        }
        assert len(kinds) == 8

    def test_norms(self, monkeypatch: pytest.MonkeyPatch):
        names = "_rms_norm_kernel", "_silu_and_mul_kernel"
        seen = stand_in(monkeypatch, norm, *names)
        self.run(["norms"], [3])
        assert [len(seen[name]) for name in names] == [3, 1]

    def test_counts_past_a_parts_limit_are_left_out(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        stand_in(monkeypatch, qk_norm_rope, "_qk_norm_rope_kernel")
        monkeypatch.setattr(nvfp4_gemv, "gemv_variant", recorder([]))
        self.run(["qkv", "qk_norm_rope"], [2, 17])
        assert capsys.readouterr().out.splitlines() == [
            "qkv at [2] tokens",
            "qk_norm_rope at [2, 17] tokens",
        ]


class TestExperts:
    run = staticmethod(
        functools.partial(parts.run_parts, moebench.exercise.PARTS, device="cpu")
    )

    @pytest.mark.parametrize(("part", "form"), [("nvfp4", "mul"), ("packed", "packed")])
    def test_every_served_variant_of_one_rank_is_launched(
        self, monkeypatch: pytest.MonkeyPatch, part: str, form: str
    ):
        from vllm.models.flint.ops.experts import align

        seen: list[tuple] = []
        for name in ("gate_up_variant", "down_variant"):
            monkeypatch.setattr(moe_gemv, name, recorder(seen))
        stand_in(monkeypatch, align, "_group_kernel")
        names = "grouped_gemm", "permute_rows", "combine_pairs"
        stand_in(monkeypatch, grouped, *names)
        self.run([part], None)
        launched = {variant for variant, _ in seen}
        for layout in ("row_major", "fragments"):
            served = moe_sets.served(form, layout, tps=(1,))
            assert len(served) >= 6 and launched >= set(served)
        assert {spec.shared is None for spec, _ in launched} == {False, True}

    def test_bf16_experts_reach_every_served_case(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        seen: list[tuple] = []
        for name in ("gate_up_variant", "down_variant"):
            monkeypatch.setattr(moe_gemv, name, recorder(seen))
        self.run(["bf16"], None)
        specs = [spec for (spec, _), _ in seen]
        assert all(spec.routed.is_bf16 for spec in specs)
        cases = {s.max_tokens for s in specs if hasattr(s, "max_tokens")}
        assert cases == {1, 8, 32}

    def test_choosing(self, monkeypatch: pytest.MonkeyPatch):
        names = "_route_kernel", "_topk_kernel"
        seen = stand_in(monkeypatch, route, *names)
        self.run(["route", "topk"], None)
        assert {g for g, _, _ in seen[names[0]].kept()} == {(32, 1), (32, 2), (32, 16)}
        assert {named["TOKENS"] for _, _, named in seen[names[1]].kept()} == {1, 4}

    def test_every_picked_tile_is_launched(self, monkeypatch: pytest.MonkeyPatch):
        from vllm.models.flint.ops.experts import align

        stand_in(monkeypatch, align, "_group_kernel")
        names = "grouped_gemm", "permute_rows", "combine_pairs"
        seen = stand_in(monkeypatch, grouped, *names)
        self.run(["grouped"], None)
        launches = seen["grouped_gemm"].kept()
        tiles = {config.block_t for config in grouped_config.picked_configs()}
        assert {named["BLOCK_T"] for _, _, named in launches} == tiles
        shared = {named["SHARED"] for _, _, named in seen["combine_pairs"].kept()}
        assert shared == {False, True}


class TestCommand:
    @pytest.mark.parametrize("cli", [attentionbench.cli, moebench.cli])
    def test_unknown_parts_are_named(
        self, cli: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ):
        monkeypatch.setattr(moebench.cli, "_has_gpu", lambda: True)
        assert cli.main(["exercise", "--only", "qvk"]) == 2
        assert "qvk: parts are" in capsys.readouterr().err

    @pytest.mark.parametrize("cli", [attentionbench.cli, moebench.cli])
    def test_options_reach_the_parts(self, cli: Any, monkeypatch: pytest.MonkeyPatch):
        asked = []
        monkeypatch.setattr(moebench.cli, "_has_gpu", lambda: True)
        monkeypatch.setattr(
            parts,
            "run_parts",
            lambda known, names, tokens: asked.append((names, tokens)),
        )
        assert cli.main(["exercise", "--only", "a", "b", "--tokens", "3"]) == 0
        assert asked == [(["a", "b"], [3])]
