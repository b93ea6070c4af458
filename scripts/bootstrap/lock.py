# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Writes requirements/*.txt: every version pinned, from one real resolution.

Run it by hand after a change of the base or of a .in file:

    .venv/bin/python scripts/bootstrap/lock.py --wheel PATCHED_CPU_WHEEL
    .venv/bin/python scripts/bootstrap/lock.py --image SOURCE_TREE
    .venv/bin/python scripts/bootstrap/lock.py --side

The first writes what .venv is made from, the second what an image is, for each CUDA
version in pin.toml, and the third the small environments of some tests. The second
resolves for another Python than the one it runs in, which uv can and pip cannot.

tools.txt and engine.txt go into one environment, so they are resolved together.
The resolution is against the package index alone, whatever else this machine's pip
is configured to use; torch then is the CUDA build, whose own libraries go to
torch-cuda.txt. That one is a constraints file: a CPU build of torch, where pip
finds one, needs none of them. An image's lock leaves such libraries out as well:
which ones torch wants differs by CUDA version, and it pins them itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from imagebuild.pairing import ImagePin, load_image_pin
from imagebuild.requirements import runtime_requirements

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
SIDE = ("lint", "resolve", "sbom", "wheelbuild", "cuda128", "cuda130")
_CUDA_PREFIXES = ("nvidia-", "cuda-")
_X86_PREFIX = "intel-"
_OLDEST_PYTHON = "3.11.2"  # Debian 12's; some packages want a later 3.11
_HEADER = "# Made by scripts/bootstrap/lock.py from {source}; do not edit.\n"


def read_inputs(path: Path) -> list[str]:
    """Return the requirements of a .in file without comments."""
    lines = (line.partition("#")[0].strip() for line in path.open(encoding="utf-8"))
    return [line for line in lines if line]


def wheel_requirements(wheel: Path) -> list[str]:
    """Return what a wheel's metadata asks for, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(names[0]).decode()
    found = HeaderParser().parsestr(text).get_all("Requires-Dist", [])
    return [
        line
        for line in found
        if "extra" not in str(Requirement(line).marker)
        and _applies(Requirement(line), "")
    ]


def resolve(requirements: list[str]) -> dict[str, dict]:
    """Return name -> core metadata of everything that pip would install."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--python-version", _OLDEST_PYTHON, "--only-binary", ":all:"]
        command += ["--ignore-installed", "--report", str(report), *requirements]
        subprocess.run(command, check=True, env=environment)
        found = json.loads(report.read_text(encoding="utf-8"))
    return {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]
        for item in found["install"]
    }


def closure(requirements: list[str], resolved: dict[str, dict]) -> set[str]:
    """Return the names that the requirements need, directly or not."""
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in resolved[name].get("requires_dist", []):
                inner = Requirement(line)
                if _applies(inner, extra):
                    todo.append(inner)
    return {name for name, _ in seen}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def write(target: str, names: set[str], resolved: dict[str, dict], source: str) -> None:
    """Write one lock file."""
    lines = []
    for name in sorted(names):
        x86_only = name.startswith(_X86_PREFIX)
        marker = '; platform_machine == "x86_64"' if x86_only else ""
        lines.append(f"{name}=={resolved[name]['version']}{marker}\n")
    text = _HEADER.format(source=source) + "".join(lines)
    (REQUIREMENTS / target).write_text(text, encoding="utf-8")
    print(f"{target}: {len(names)} packages")


def lock_environment(wheel: Path) -> None:
    """Write what .venv and the reference environment are made from."""
    tools = read_inputs(REQUIREMENTS / "tools.in")
    direct = read_inputs(REQUIREMENTS / "engine.in")
    engine = direct + wheel_requirements(wheel)
    resolved = resolve(tools + engine)
    engine_names = closure(engine, resolved)
    # The kernels' compiler has such names too, and needs no CUDA build of torch.
    own = closure([line for line in direct if not line.startswith("torch")], resolved)
    cuda = {name for name in engine_names - own if name.startswith(_CUDA_PREFIXES)}
    write("tools.txt", closure(tools, resolved), resolved, "tools.in")
    source = "engine.in and the patched wheel's metadata"
    write("engine.txt", engine_names - cuda, resolved, source)
    write("torch-cuda.txt", cuda, resolved, source)
    reference = read_inputs(REQUIREMENTS / "reference.in")
    resolved = resolve(reference)
    names = closure(reference, resolved)
    cuda = {name for name in names if name.startswith(_CUDA_PREFIXES)}
    write("reference.txt", names - cuda, resolved, "reference.in")


def lock_images(tree: Path) -> None:
    """Write what an image's environment is made from, besides torch's libraries."""
    image = load_image_pin(ROOT)
    for name, pairing in image.pairings.items():
        wanted = runtime_requirements(tree, pairing, local=False)
        direct = {canonicalize_name(Requirement(line).name) for line in wanted}
        pins = [
            pin
            for pin in _resolve_for_image(wanted, image)
            if not pin.startswith(_CUDA_PREFIXES) or pin.partition("==")[0] in direct
        ]
        header = _HEADER.format(source=f"the base's requirements for {name}")
        text = header + "".join(f"{pin}\n" for pin in pins)
        (REQUIREMENTS / f"image-{name}.txt").write_text(text, encoding="utf-8")
        print(f"image-{name}.txt: {len(pins)} packages")


def _resolve_for_image(wanted: list[str], image: ImagePin) -> list[str]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--no-config"]
    command += ["--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    command += ["--python-version", image.python]
    command += ["--python-platform", image.platform]
    done = subprocess.run(
        command, input="\n".join(wanted), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"uv could not resolve (pip install uv, if it is missing):\n{done.stderr}"
        )
    return done.stdout.splitlines()


def lock_side() -> None:
    """Write the small environments that some tests make for themselves."""
    for name in SIDE:
        resolved = resolve(read_inputs(REQUIREMENTS / f"{name}.in"))
        write(f"{name}.txt", set(resolved), resolved, f"{name}.in")


def main() -> int:
    """Write the lock files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--wheel", type=Path, metavar="FILE", help="for .venv")
    what.add_argument("--image", type=Path, metavar="DIR", help="for images")
    what.add_argument("--side", action="store_true", help="for some tests")
    args = parser.parse_args()
    if args.wheel:
        lock_environment(args.wheel)
    elif args.image:
        lock_images(args.image)
    else:
        lock_side()
    return 0


if __name__ == "__main__":
    sys.exit(main())
