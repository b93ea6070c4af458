# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Variants compiled ahead of time, by several processes, without a GPU."""

import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm
from vllm.models.flint.ops.attention.config import DecodeConfig, DecodeSpec
from vllm.models.flint.ops.gemv.config import GemvSpec

from gemvbench.sets import Variant as GemvVariant

# Of GEMVs, of the decode attention or, in `moebench.sets`, of the experts.
Variant: TypeAlias = GemvVariant | tuple[DecodeSpec, DecodeConfig] | tuple[Any, Any]

# What only chooses among kernels is no part of their identity.
_NOT_KERNELS = {"disk_cache.py", "tables.py", "variants.py", "workspace.py"}


def _source_key() -> str:
    from vllm.models.flint.ops import attention, experts, gemv

    digest = hashlib.sha256()
    for package in (attention, experts, gemv):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            if path.name not in _NOT_KERNELS:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _compiler(variant: Variant) -> Callable[..., Any]:
    from vllm.models.flint.ops.attention.compile import compile_decode
    from vllm.models.flint.ops.experts.compile import compile_down, compile_gate_up
    from vllm.models.flint.ops.experts.spec import DownSpec, GateUpSpec
    from vllm.models.flint.ops.gemv.compile import compile_dequantize, compile_gemv

    compilers: dict[type, Callable[..., Any]] = {
        int: compile_dequantize,
        GemvSpec: compile_gemv,
        DecodeSpec: compile_decode,
        GateUpSpec: compile_gate_up,
        DownSpec: compile_down,
    }
    return compilers[type(variant[0])]


def variant_name(variant: Variant) -> str:
    """A name for the variant's function, the same in every process."""
    return "variant_" + hashlib.sha256(repr(variant).encode()).hexdigest()[:20]


def _usage(cubin: Path) -> dict[str, int]:
    """Registers, stack and local bytes; empty where no cuobjdump is at hand."""
    command = ["cuobjdump", "-res-usage", str(cubin)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    fields = re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)
    return {name.lower(): int(value) for name, value in fields}


def _start_worker(arch: str) -> None:
    """CuTe DSL reads these when it is imported."""
    folder = tempfile.mkdtemp(prefix="gemv-")
    os.environ.update(
        CUTE_DSL_ARCH=arch, CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_KEEP_CUBIN="1"
    )
    tools = Path(sys.prefix).glob("lib/*/site-packages/nvidia/cu13/bin")
    os.environ["PATH"] += "".join(f":{path}" for path in tools)


def _compile(job: tuple[Variant, Path]) -> str | None:
    """Writes a variant's object and record; returns what went wrong."""
    variant, folder = job
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for old in dump.iterdir():
        old.unlink()
    name = variant_name(variant)
    try:
        compiled = _compiler(variant)(*variant)
        compiled.export_to_c(str(folder / f"{name}.o"), function_name=name)
    except Exception as error:
        return f"{variant}: {type(error).__name__}: {error}"
    record = _usage(next(dump.glob("*.cubin"))) | {"variant": repr(variant)}
    (folder / f"{name}.json").write_text(json.dumps(record))
    return None


def _link_flags() -> list[str]:
    import tvm_ffi

    flags = []
    for option in ("--ldflags", "--libs"):
        command = [sys.executable, "-m", "cutlass.cute.export.aot_config", option]
        done = subprocess.run(
            [*command, "--with-tvm-ffi"], capture_output=True, text=True, check=True
        )
        flags += done.stdout.split()
    flags.append("-L" + os.path.dirname(tvm_ffi.libinfo.find_libtvm_ffi()))
    return flags


def build(variants: Iterable[Variant], folder: Path, arch: str, jobs: int) -> Path:
    """Compiles what is missing and links one library of these variants.

    Args:
        variants: What the library must hold.
        folder: Keeps objects between calls, by target and source.
        arch: Target, as sm_90a.
        jobs: Processes to use.

    Returns:
        The library; its records lie beside it.
    """
    wanted = list(dict.fromkeys(variants))
    objects = folder / f"{arch}-{_source_key()}"
    objects.mkdir(parents=True, exist_ok=True)
    missing = [v for v in wanted if not (objects / f"{variant_name(v)}.json").exists()]
    if missing:
        # A fresh interpreter each: CuTe DSL must read the target when imported.
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, _start_worker, (arch,)) as pool:
            work = pool.imap_unordered(_compile, [(v, objects) for v in missing])
            for problem in tqdm(work, total=len(missing), desc="compile"):
                if problem:
                    tqdm.write(f"not compiled: {problem}")
    names = [variant_name(v) for v in wanted]
    names = [name for name in names if (objects / f"{name}.json").exists()]
    library = folder / f"{arch}.so"
    command = ["gcc", "-shared", "-o", str(library)]
    command += [str(objects / f"{name}.o") for name in names]
    subprocess.run([*command, *_link_flags()], check=True)
    records = {n: json.loads((objects / f"{n}.json").read_text()) for n in names}
    library.with_suffix(".json").write_text(json.dumps(records))
    print(f"{len(names)} variants, {library.stat().st_size >> 20} MiB in {library}")
    return library


class Library:
    """A library that `build` made; without one it is empty."""

    def __init__(self, path: Path | None) -> None:
        self._module = None
        self._records: dict[str, dict] = {}
        if path is not None and path.exists():
            import cutlass.cute as cute

            self._module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            self._records = json.loads(path.with_suffix(".json").read_text())

    def __contains__(self, variant: Variant) -> bool:
        return variant_name(variant) in self._records

    def usage(self, variant: Variant) -> dict[str, int]:
        """Registers (`reg`), `stack` and `local` bytes, where known."""
        return self._records.get(variant_name(variant), {})

    def offer(self, variants: Iterable[Variant]) -> int:
        """Gives the overlay those variants that are here; returns how many."""
        from vllm.models.flint.ops.gemv.variants import add_prebuilt

        count = 0
        for variant in variants:
            if variant in self:
                add_prebuilt(variant, getattr(self._module, variant_name(variant)))
                count += 1
        return count
