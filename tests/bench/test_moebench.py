# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The benchmark of the sparse block without a GPU: inputs, checks, sweeps, tables."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from contract import ops
from contract.numerics import Numerics
from gemvbench.tune import Results
from moebench import cli, compare, sets, tune
from moebench.weights import BlockWeights, Sizes, Tokens, chosen, expected, met
from tinymodel.specs import SPECS

TINY = Sizes.of(SPECS["tiny"])


@pytest.fixture
def weights() -> BlockWeights:
    torch.manual_seed(0)
    return BlockWeights.random(TINY, device="cpu")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr("gemvbench.tune.copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr("gemvbench.tune.provenance", lambda: {"command": "x"})
    return Results(tmp_path / "x.json")


class TestInputs:
    def test_bytes_of_one_token(self):
        sizes = Sizes.of()
        router, shared, expert = 1 << 20, 3 << 20, 3 << 19
        nvfp4 = (shared * 2 // 2 + 6 * expert * 2 // 2) * 9 / 16 * 2
        assert sizes.n_bytes(6) == pytest.approx(router + nvfp4)

    def test_ranks_share_the_experts_width(self):
        assert Sizes.of(tp=2) == Sizes(2048, 256, 6, 256, 512)

    def test_expected_is_the_contracts(self, weights: BlockWeights):
        tokens = Tokens.random(3, TINY.hidden, device="cpu")
        found = expected(tokens, weights).double()
        normed = tokens.normed(weights)
        ids = chosen(normed, weights)
        for row, token, experts in zip(found, normed.double(), ids):
            logits = weights.router.double() @ token
            scores = logits[experts].sigmoid()
            shares = scores / scores.sum()
            total = ops.dense_mlp(token, *dense(weights), Numerics.EXACT)
            for expert, share in zip(experts, shares):
                total = total + share * ops.dense_mlp(
                    token, *dense(weights, int(expert)), Numerics.EXACT
                )
            torch.testing.assert_close(row, total, rtol=1e-3, atol=1e-3)

    def test_ties_go_to_the_lower_expert(self, weights: BlockWeights):
        weights.router[5] = weights.router[2]
        normed = torch.randn(200, TINY.hidden).bfloat16()
        ids = chosen(normed, weights)
        assert not ((ids == 5).any(-1) & ~(ids == 2).any(-1)).any()

    def test_tokens_meet_many_experts(self):
        torch.manual_seed(0)
        weights = BlockWeights.random(Sizes(256, 64, 6, 32, 32), "cpu")
        ids = chosen(Tokens.random(64, 256, "cpu").normed(weights), weights)
        assert met(ids) > 55

    def test_names_and_shapes_are_those_of_modelopt(self, weights: BlockWeights):
        named = weights.named()
        e, h, i = TINY.experts, TINY.hidden, TINY.width
        assert named["w13_weight"].shape == (e, 2 * i, h // 2)
        assert named["w13_weight_scale"].shape == (e, 2 * i, h // 16)
        assert named["w13_weight_scale_2"].shape == (e, 2)
        assert named["w2_weight"].shape == (e, h, i // 2)
        assert named["down_proj.weight_scale"].shape == (h, TINY.shared // 16)


def dense(
    weights: BlockWeights, expert: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 gate, up and down rows."""
    from gemvbench.weights import Weight

    up, down = weights.gate_up, weights.down
    if expert is not None:
        part = slice(expert, expert + 1)
        up = Weight(weights.w1[expert], weights.w1_scale[expert], weights.alpha1[part])
        down = Weight(
            weights.w2[expert], weights.w2_scale[expert], weights.alpha2[part]
        )
    rows = [x.dequantized().double() * x.global_scale.double() for x in (up, down)]
    gate, up_rows = rows[0].chunk(2)
    return gate, up_rows, rows[1]


class StandIn:
    """A block that answers right, or not."""

    def __init__(self, weights: BlockWeights, factor: float) -> None:
        self.weights, self.factor = weights, factor

    def __call__(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        out = expected(tokens, self.weights) * self.factor
        return out.bfloat16(), tokens.x + tokens.residual


class TestCompare:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch):
        def blocks(name: str, weights: list[BlockWeights], most: int) -> list[Any]:
            if name == "humming":
                raise ImportError("no humming")
            factor = {"ours": 1.0, "marlin": 1.1}[name]
            return [StandIn(w, factor) for w in weights]

        def timed(launches: list[Any]) -> float:
            for launch in launches:
                launch()
            return 10.0

        for kind in (BlockWeights, Tokens):
            on_cpu = functools.partial(kind.random, device="cpu")
            monkeypatch.setattr(kind, "random", on_cpu)
        monkeypatch.setattr(compare, "FLINT", SPECS["tiny"])
        monkeypatch.setattr(compare, "make_blocks", blocks)
        monkeypatch.setattr(compare, "graph_us", timed)

    def test_a_wrong_contender_is_marked_and_a_missing_one_recorded(
        self, results: Results
    ):
        names = ["ours", "marlin", "humming"]
        compare.compare(results, names, [1, 16], copies=2)
        right = {(r["contender"], r["m"]): r["right"] for r in results.rows}
        assert right == {
            ("ours", 1): True,
            ("ours", 16): True,
            ("marlin", 1): False,
            ("marlin", 16): False,
        }
        assert "no humming" in results.failures[0]["error"]
        assert results.path.exists()
        lines = compare.text_table(results.rows).splitlines()
        assert lines[0].split() == ["tokens", "experts", "MB", "ours", "marlin"]
        assert lines[1].endswith("%!") and lines[1].split()[:2] == ["1", "2.0"]

    def test_nan_is_wrong(self, weights: BlockWeights):
        tokens = Tokens.random(3, TINY.hidden)
        assert compare.error(StandIn(weights, float("nan")), tokens, weights) > 1


class TestSweeps:
    def test_every_schedule_fits_and_none_comes_twice(self):
        found = sets.swept("mul", "fragments")
        assert len(set(found)) == len(found) > 60
        assert all(config.why_not(spec) is None for spec, config in found)

    def test_what_is_served_has_every_count_of_tokens(self):
        layouts = ("row_major", "fragments")
        for form, layout in itertools.product(("mul", "packed"), layouts):
            found = sets.served(form, layout)
            # At one rank and two: five functions, the last in several schedules.
            assert len({spec for spec, _ in found}) == 10
            assert len(set(found)) == len(found)
            assert len(found) == (12 if form == "mul" else 14)

    def test_a_schedule_holds_for_its_block_only(self, monkeypatch: pytest.MonkeyPatch):
        picked = []
        monkeypatch.setattr(
            tune.moe_gemv, "down_variant", lambda spec, config: picked.append(config)
        )
        with tune.scheduled("down", "another"):
            tune.moe_gemv.down_variant("spec", "own")
        tune.moe_gemv.down_variant("spec", "own")
        assert picked == ["another", "own"]

    def test_table_shows_the_picked_and_the_fastest(self, results: Results):
        for us, config in ((5.0, "picked"), (4.0, {"depth": 2}), (6.0, {"depth": 1})):
            results.add(1000, us, kind="gate_up", m=1, config=config)
        lines = tune.best_table(results.rows, most=1).splitlines()
        assert lines[0] == "gate_up at 1 tokens"
        assert lines[1].startswith(" *") and "{'depth': 2}" in lines[2]
        assert len(lines) == 3

    def test_limits_move_for_the_dispatch_too(self):
        from vllm.models.flint.ops import moe
        from vllm.models.flint.ops.experts import dispatch

        before = moe.DECODE_MAX_TOKENS
        with tune._limits({"DECODE_MAX_TOKENS": 0}):
            assert moe.DECODE_MAX_TOKENS == dispatch.DECODE_MAX_TOKENS == 0
        assert moe.DECODE_MAX_TOKENS == dispatch.DECODE_MAX_TOKENS == before


class TestCommand:
    @pytest.mark.parametrize("command", ["build", "compare", "tune", "layer"])
    def test_help(self, command: str, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        assert "--out" in capsys.readouterr().out

    def test_layer_table(self, results: Results):
        from moebench.layer import text_table

        case = {"batch": 1, "context": 1024, "sliding": False}
        results.add(4_000_000, 20.0, **case, stage="layer", launches=7)
        results.add(1_000_000, 4.0, **case, stage="route", share_us=2.5)
        lines = text_table(results.rows).splitlines()
        assert lines[1].split() == [
            *("full", "1024", "batch", "1", "20.00", "5", "7", "launches")
        ]
        assert lines[2].split() == ["route", "2.50", "4.00", "6"]
