# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What pip installs into an image, for each CUDA version, and its locks."""

import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from imagebuild.pairing import ImagePin, load_image_pin
from imagebuild.requirements import runtime_requirements
from support.image_steps import ROOT, imagebuild
from support.side_env import side_environment

PAIRINGS = sorted(load_image_pin(ROOT).pairings)


def locked(name: str) -> dict[str, str]:
    """Return project -> version of a lock, for this machine."""
    pins = {}
    for line in (ROOT / "requirements" / f"image-{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name] = str(pin.specifier).removeprefix("==")
    return pins


def test_cuda_12_8_changes_these_lines_and_no_other(
    source_stage: Path, image: ImagePin
):
    base = runtime_requirements(source_stage, image.pairings["cu130"])
    changed = runtime_requirements(source_stage, image.pairings["cu128"])
    assert [(a, b) for a, b in zip(base, changed, strict=True) if a != b] == [
        ("torch==2.13.0", "torch==2.11.0+cu128"),
        ("torchvision==0.28.0", "torchvision==0.26.0"),
        ("nvidia-cutlass-dsl[cu13]==4.8.0", "nvidia-cutlass-dsl==4.8.0"),
        ("humming-kernels[cu13]==0.1.17", "humming-kernels[cu12]==0.1.17"),
    ]


def test_cuda_13_0_is_what_the_base_requires(source_stage: Path, image: ImagePin):
    done = imagebuild("requirements", source_stage, "--cuda", "13.0.3")
    assert done.returncode == 0, done.stderr
    wanted = {Requirement(line) for line in done.stdout.splitlines()}
    text = (source_stage / "requirements" / "cuda.txt").read_text()
    for line in text.splitlines():
        line = line.partition(" #")[0].strip()
        if line and not line.startswith(("#", "-")):
            assert Requirement(line) in wanted


@pytest.mark.parametrize("which", [(), ("--for-build",)])
def test_torch_for_12_8_needs_an_index_and_says_so(
    source_stage: Path, which: tuple[str, ...]
):
    done = imagebuild("requirements", source_stage, *which)
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch 2.11.0+cu128 is on PyTorch's own wheel index only" in done.stderr
    url = "https://index.example/cu128"
    done = imagebuild("requirements", source_stage, *which, "--torch-index", url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"--extra-index-url {url}\n")
    assert "\ntorch==2.11.0+cu128\n" in done.stdout


def test_another_cuda_version_is_refused(source_stage: Path):
    done = imagebuild("requirements", source_stage, "--cuda", "12.6.0")
    assert done.returncode == 2
    assert "there are: 12.8.1, 13.0.3" in done.stderr


@pytest.mark.parametrize("name", PAIRINGS)
def test_the_lock_holds_what_is_required(
    name: str, source_stage: Path, image: ImagePin
):
    pins = locked(name)
    wanted = runtime_requirements(source_stage, image.pairings[name], local=False)
    environment = {"python_version": image.python, "python_full_version": "3.12.3"}
    wrong = []
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            wrong.append((str(requirement), pin))
    assert wrong == []


@pytest.mark.parametrize("name", PAIRINGS)
def test_the_lock_resolves(
    name: str, source_stage: Path, image: ImagePin, tmp_path: Path
):
    """On the ordinary index. Of torch for CUDA 12.8 it has not the +cu128 build."""
    wanted = tmp_path / "wanted.txt"
    lines = runtime_requirements(source_stage, image.pairings[name], local=False)
    wanted.write_text("\n".join(lines))
    uv = side_environment("resolve") / "bin" / "uv"
    command = [str(uv), "pip", "compile", str(wanted), "--no-config", "--quiet"]
    command += ["--python-version", image.python, "--python-platform", image.platform]
    command += ["--no-header", "--no-annotate", "--only-binary", ":all:"]
    command += ["--constraint", str(ROOT / "requirements" / f"image-{name}.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    resolved = dict(line.split("==") for line in done.stdout.splitlines())
    pins = locked(name)
    assert pins.items() <= resolved.items()
    # What the lock leaves open are libraries of CUDA, which torch pins.
    assert all(x.startswith(("nvidia-", "cuda-")) for x in resolved.keys() - pins)
