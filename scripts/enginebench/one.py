# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Runs one engine in a process of its own: `python -m enginebench.one JOB RESULT`."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from enginebench import measure
from enginebench.engines import ENGINES, POINTS, Engine, Points
from enginebench.models import FLINT, kv_cache_bytes, weight_bytes, write_config
from enginebench.results import FIRST, STEP, Rows, write_json
from enginebench.turn import Turn
from tinymodel.specs import TinySpec

# The share of the KV cache that requests may need: groups of layers round up.
_KV_SHARE = 0.85
# What an engine takes beside weights and KV cache: a step's tensors, graphs, CUDA.
_OTHER_BYTES = 6 << 30


@dataclass
class Run:
    """One engine's measurements, saved as they come.

    Attributes:
        path: JSON file.
        spec: The model.
        points: What to time.
        result: What was found.
    """

    path: Path
    spec: TinySpec
    points: Points
    result: dict[str, Any]

    def save(self, **values: Any) -> None:
        """Adds values and writes the file."""
        self.result |= values
        write_json(self.path, self.result)

    def measure(self, llm: Any) -> None:
        """Times every point; one that the engine cannot run is recorded as such."""
        total = len(self.points.decode) + len(self.points.prompts) + 1
        with tqdm(total=total, desc="measuring", unit="point") as progress:
            for prompt in self.points.prompts:
                row = {"prompt": prompt}
                self._add(FIRST, row, self._first(llm, prompt))
                progress.update()
            for batch, context in self.points.decode:
                row = {"context": context, "batch": batch}
                self._add(STEP, row, self._step(llm, batch, context))
                progress.update()
            try:
                self.save(cuda_graph=measure.graph_ms(llm, *self.points.graph))
            except measure.PointError as error:
                self._skip({"cuda_graph": self.points.graph}, str(error))
            progress.update()

    def _first(self, llm: Any, prompt: int) -> Callable[[], float]:
        return lambda: measure.time_to_first_token(llm, prompt)

    def _step(self, llm: Any, batch: int, context: int) -> Callable[[], float]:
        def run() -> float:
            held = _KV_SHARE * self.result["memory"]["kv_cache"]
            if kv_cache_bytes(self.spec, batch, context) > held:
                raise measure.PointError("the KV cache does not hold so many tokens")
            return measure.time_per_output_token(llm, batch, context)

        return run

    def _add(self, key: str, row: dict[str, Any], run: Callable[[], float]) -> None:
        try:
            ms = 1e3 * run()
        except measure.PointError as error:
            self._skip(row, str(error))
            return
        rows: Rows = self.result.setdefault(key, [])
        rows.append(row | {"ms": round(ms, 4)})
        self.save()

    def _skip(self, row: dict[str, Any], why: str) -> None:
        self.result.setdefault("skipped", []).append(row | {"why": why})
        self.save()


def llm_options(
    engine: Engine, points: Points, folder: Path, more: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of `LLM` for an engine; `more` wins over everything else."""
    from enginebench.synthetic import LOAD_FORMAT, WORKER_EXTENSION

    longest = max(
        context + measure.max_new_tokens(batch, context)
        for batch, context in (*points.decode, (1, points.max_tokens))
    )
    options: dict[str, Any] = {
        "model": str(folder),
        "load_format": LOAD_FORMAT,
        "worker_extension_cls": WORKER_EXTENSION,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": points.max_batch,
        "max_model_len": longest,
        "max_num_batched_tokens": measure.STEP_TOKENS,
    }
    return options | engine.options | more


def kv_cache_option(
    options: dict[str, Any], spec: TinySpec, nvfp4: bool, gpu_bytes: int
) -> dict[str, Any]:
    """An engine's KV cache where others start beside it.

    vLLM sizes it by what the GPU's free memory loses while the engine starts, and that
    is all engines' doing.
    """
    if "kv_cache_memory_bytes" in options:
        return {}
    share = int(options["gpu_memory_utilization"] * gpu_bytes)
    left = share - weight_bytes(spec, nvfp4) - _OTHER_BYTES
    if left <= 0:
        raise SystemExit(
            f"enginebench: {share / 2**30:.0f} GiB of the GPU are too few for an engine"
        )
    return {"kv_cache_memory_bytes": left}


def run_engine(job: dict[str, Any], path: Path) -> None:
    """Starts the engine that `job` describes and writes its measurements to `path`."""
    start = time.perf_counter()
    together = "turn" in job
    turn = Turn(job.get("turn"))
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise SystemExit("enginebench: this machine has no CUDA device")
    engine, points = ENGINES[job["engine"]], POINTS[job["points"]]
    run = Run(path, FLINT, points, {"status": "started", "env": engine.env})
    with tempfile.TemporaryDirectory() as folder:
        nvfp4 = job["weights"] == "nvfp4"
        write_config(Path(folder), run.spec, nvfp4)
        options = llm_options(engine, points, Path(folder), job["options"])
        if together:
            gpu_bytes = current_platform.get_device_total_memory()
            options |= kv_cache_option(options, run.spec, nvfp4, gpu_bytes)
        run.save(options={k: v for k, v in options.items() if k != "model"})
        from vllm import LLM

        llm = LLM(**options)
        memory = llm.collective_rpc("bench_memory")[0]
        if together:
            # All engines hold it.
            del memory["device"]
        run.save(
            startup_s=round(time.perf_counter() - start, 1),
            machine=llm.collective_rpc("bench_machine")[0],
            memory=memory,
        )
        turn.wait()
        run.measure(llm)
        turn.end()
    run.save(status="done")


if __name__ == "__main__":
    run_engine(json.loads(sys.argv[1]), Path(sys.argv[2]))
