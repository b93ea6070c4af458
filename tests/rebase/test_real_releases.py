# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""This repository's own series on vLLM's releases; every row was checked by hand.

0.31.0 is an archive that other tests download anyway. The rest is run by

    FLINT_TEST_RELEASES=1 .venv/bin/python -m pytest tests/rebase/test_real_releases.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from patchset.rebase.command import rebase
from patchset.rebase.results import RebaseReport
from patchset.repo import Repo
from support.synthetic_vllm import git

REGISTER = "model-register-flint"
SPECULATORS = "bugfix-honor-hf-config-path-when-looking-for-speculators"
GGUF = "model-load-flint-from-an-nvfp4-gguf"
FRONTEND = "frontend-print-what-is-wrong-with-a-flint-checkpoint-in-one"
BACKEND = "kernel-offer-flint-s-nvfp4-gemv-as-a-linear-backend"
PACKAGING = "build-put-flint-s-data-files-into-wheels-built-from-source"
SAMPLING = "perf-copy-sampling-states-only-after-a-request-was-added"
INPUTS = "perf-keep-inputs-that-the-requests-of-a-decode-step-decide"
GREEDY = "perf-take-the-argmax-of-batches-that-are-all-greedy"

# What does not fit: (patch, file): (what became of the code, first release without).
# In common.txt 0.31.0 has another filelock line right below the added one. Until
# 0.31.0 the runner's idx_mapping is int32. Until 0.30.0 config.py spells it
# PretrainedConfig, and the sampler takes no custom logits processors and no bounds of
# lengths. 0.29.0 has no IPC loader to stand beside, has its dispatch one level deeper,
# words modelopt.md otherwise, has its W4A16 kernels on one line, and calls
# async_tensor_h2d otherwise.
FILELOCK = {(GGUF, "requirements/common.txt"): ("changed", "0.31.0")}
INT32 = {(INPUTS, "vllm/v1/worker/gpu/model_runner.py"): ("changed", "0.31.0")}
PRETRAINED = {(SPECULATORS, "vllm/transformers_utils/config.py"): ("changed", "0.30.0")}
SAMPLER = {
    (SAMPLING, "vllm/v1/worker/gpu/sample/sampler.py"): ("vanished", "0.30.0"),
    (GREEDY, "vllm/v1/worker/gpu/sample/sampler.py"): ("changed", "0.30.0"),
}
OLDEST = {
    (GGUF, "vllm/model_executor/model_loader/__init__.py"): ("changed", "0.29.0"),
    (FRONTEND, "vllm/entrypoints/cli/main.py"): ("changed", "0.29.0"),
    (BACKEND, "docs/features/quantization/modelopt.md"): ("changed", "0.29.0"),
    (BACKEND, "vllm/model_executor/kernels/linear/__init__.py"): ("changed", "0.29.0"),
    (INPUTS, "vllm/v1/worker/gpu/model_runner.py"): ("changed", "0.29.0"),
}
TROUBLES = {
    "0.31.0": FILELOCK | INT32,
    "0.30.0": FILELOCK | INT32 | PRETRAINED | SAMPLER,
    "0.29.0": FILELOCK | PRETRAINED | SAMPLER | OLDEST,
    "0.33.0": {},
}
# What the overlay uses and those releases do not have; by the last name.
DRIFT = {
    "0.31.0": set(),
    "0.30.0": {
        "GateLinear",  # takes no quant_config yet
        "aux_output_config",
    },
    "0.29.0": {
        "GateLinear",
        "aux_output_config",
        "_get_linear_backend",  # takes no argument yet
        "flashinfer_prepare_bf16_fp4_weights",
        "FlashInferCuteDslNvFp4W4A16LinearKernel",  # and with it the base class of
        "is_supported",
        "process_weights_after_loading",
        "apply_weights",
        "ModelOptLinearMethod",
        "spec_decode_needs_target_embed",
    },
    "0.33.0": set(),
}
MORE = ("0.30.0", "0.29.0", "0.33.0")
wanted = pytest.mark.skipif(
    not os.environ.get("FLINT_TEST_RELEASES"), reason="FLINT_TEST_RELEASES is not set"
)


@pytest.fixture
def report(request: pytest.FixtureRequest, tmp_path: Path, real_repo: Repo):
    return rebase(real_repo, request.param, work_folder=tmp_path).report


@pytest.mark.parametrize(
    "report",
    [
        "0.31.0",
        *(pytest.param(v, marks=wanted) for v in MORE),
    ],
    indirect=True,
)
def test_statuses_and_causes(report: RebaseReport) -> None:
    found = {}
    for patch in report.patches:
        for trouble in patch.troubles:
            assert trouble.cause is not None
            cause = (trouble.cause.fate, trouble.cause.release)
            found[patch.name, trouble.path] = cause
    assert found == TROUBLES[report.onto]
    stuck = {name for name, _ in found}
    for patch in report.patches:
        if patch.name in stuck:
            assert patch.status == "conflict"
        elif report.onto == "0.33.0" and patch.name == REGISTER:
            assert patch.status == "superseded"
        elif patch.name in (PACKAGING, SAMPLING, GREEDY):
            # The lines around are the same.
            assert patch.status == "clean"
        else:
            assert patch.status == "clean-with-offset"
    assert {d.name.rpartition(".")[2] for d in report.drift} == DRIFT[report.onto]
    assert report.exit_code == (1 if found or report.drift else 0)


@wanted
@pytest.mark.parametrize("report", ["0.33.0"], indirect=True)
def test_later_release_has_a_flint_of_its_own(
    report: RebaseReport, real_repo: Repo
) -> None:
    """Ours supersede it completely: one row in each table, and only our files."""
    store, branch = Path(report.store), report.branch
    listed = git(store, "ls-tree", "-r", "--name-only", branch).splitlines()
    ours = {file.path for file in real_repo.overlay}
    assert {path for path in listed if "/flint/" in path} <= ours
    assert {item.outcome for item in report.superseded} == {
        "replaced",
        "removed",
        "same",
    }
    for patch in real_repo.series:
        for diff in patch.files:
            text = git(store, "show", f"{branch}:{diff.path}")
            for row in ('"FlintForCausalLM": ', 'flint="', "| `FlintForCausalLM`"):
                assert text.count(row) <= (2 if "config.py" in diff.path else 1)
