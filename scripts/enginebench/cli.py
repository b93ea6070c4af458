# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line: makes a model, starts an engine, prints a table, writes JSON."""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from enginebench.measure import measure
from enginebench.models import write_config, write_synthetic_gguf
from provenance import provenance


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginebench",
        description="Time the vLLM engine on this machine's GPU with a model of "
        "Flint's size and synthetic weights.",
    )
    parser.add_argument("--weights", choices=("bf16", "nvfp4"), required=True)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 1024], metavar="TOKENS"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[128, 1024, 8000], metavar="TOKENS"
    )
    parser.add_argument("--engine", default="{}", help="more LLM arguments, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--scratch", type=Path, help="where the 23 GB model goes (default: /tmp)"
    )
    return parser


def _engine(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_config(folder)
    engine: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(args.batches),
        "max_model_len": max(*args.contexts, *args.prompts) + 256,
        "max_num_batched_tokens": 8192,
    }
    if args.weights == "nvfp4":
        path = folder / "flint.gguf"
        print(f"Writing {path}", flush=True)
        write_synthetic_gguf(path)
        engine |= {"model": str(path), "hf_config_path": str(folder)}
        engine |= {"load_format": "auto", "tokenizer": str(folder)}
    return engine | json.loads(args.engine)


def _print(result: dict[str, Any]) -> None:
    rows = result["time_per_output_token"]
    batches = sorted({r["batch"] for r in rows})
    print("\nms a token at batch    " + "".join(f"{b:>8}" for b in batches))
    for context in sorted({r["context"] for r in rows}):
        cells = {r["batch"]: r["ms"] for r in rows if r["context"] == context}
        line = "".join(f"{cells[b]:8.2f}" for b in batches)
        print(f"context {context:>6} tokens  {line}")
    for row in result["time_to_first_token"]:
        print(f"first token of a {row['prompt']:>5}-token prompt: {row['ms']:.1f} ms")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0, or 1 after one line that says what is wrong."""
    args = _parser().parse_args(argv)
    # This process looks at the GPU too, and CUDA does not survive a fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    import torch

    if not torch.cuda.is_available():
        print("enginebench: torch finds no CUDA device on this machine")
        return 1
    from vllm import LLM

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        engine = _engine(args, Path(folder))
        start = time.perf_counter()
        llm = LLM(**engine)
        startup = time.perf_counter() - start
        result = measure(llm, args.batches, args.contexts, args.prompts)
    result |= {
        "weights": args.weights,
        "startup_s": round(startup, 1),
    } | provenance()
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    _print(result)
    return 0
