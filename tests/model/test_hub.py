# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A GGUF in a hub repository of its own, as Flint's is published."""

from pathlib import Path

import pytest

from support.engine import EngineError, Pass, run_engine
from support.hub import Hub, serve_hub
from support.logits import assert_float32, prompts_of, references
from tinymodel import SPECS, write_gguf

MODEL, CONFIG = "flint-test/nvfp4-gguf", "flint-test/flint"


def run(hub: Hub, cache: Path, passes: list[Pass]):
    return run_engine(
        passes,
        environment={
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        },
        model=MODEL,
        hf_config_path=CONFIG,
        tokenizer=CONFIG,
        dtype="float32",
    )


def test_repository_with_one_gguf(checkpoint, tmp_path: Path) -> None:
    refs = references("tiny", "nvfp4", "float32")
    repository = tmp_path / "nvfp4-gguf"
    write_gguf(repository / "flint.gguf", SPECS["tiny"], 0, "nvfp4")
    (repository / "README.md").write_text("No config and no tokenizer here.")
    repositories = {
        MODEL: repository,
        CONFIG: checkpoint("tiny", "nvfp4", "safetensors"),
    }
    with serve_hub(repositories) as hub:
        (answers,) = run(hub, tmp_path / "cache", [Pass(prompts_of(refs))])
    assert_float32(answers, refs)
    assert hub.downloads[f"{MODEL}/flint.gguf"] == 1
    # The weights of the repository that gives the config are not wanted.
    assert hub.downloads[f"{CONFIG}/model.safetensors"] == 0


def test_repository_with_two_ggufs(checkpoint, tmp_path: Path) -> None:
    repository = tmp_path / "nvfp4-gguf"
    for name in ("a.gguf", "b.gguf"):
        write_gguf(repository / name, SPECS["tiny"], 0, "nvfp4")
    repositories = {
        MODEL: repository,
        CONFIG: checkpoint("tiny", "nvfp4", "safetensors"),
    }
    with (
        serve_hub(repositories) as hub,
        pytest.raises(EngineError, match=r"2 GGUF files \(a.gguf, b.gguf\)"),
    ):
        run(hub, tmp_path / "cache", [Pass([[5, 6, 7]])])
    assert not any(name.endswith(".gguf") for name in hub.downloads)
