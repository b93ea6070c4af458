# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The command line: writes a tiny checkpoint in one format or both."""

import argparse
import sys
from pathlib import Path

from tinymodel import FAMILIES, SPECS, write_gguf, write_safetensors
from tinymodel.checkpoint import OutputExistsError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinymodel",
        description="Write a tiny Flint checkpoint: OUT/bf16/ (safetensors, config, "
        "tokenizer) and OUT/gguf/flint-SPEC-nvfp4.gguf, of the same weights.",
    )
    parser.add_argument("--spec", choices=SPECS, default="tiny")
    parser.add_argument(
        "--format", choices=("safetensors", "gguf", "both"), default="both"
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default="nvfp4",
        help="nvfp4: exact in both formats (default); nvfp4-odd: tensor scales that "
        "are no powers of two; bf16: not quantized",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is at OUT already"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 after one line that says what is wrong."""
    args = _parser().parse_args(argv)
    spec = SPECS[args.spec]
    paths = []
    try:
        if args.format != "gguf":
            paths.append(args.out / "bf16")
            write_safetensors(
                paths[-1], spec, args.seed, args.family, overwrite=args.overwrite
            )
        if args.format != "safetensors":
            paths.append(args.out / "gguf" / f"flint-{spec.name}-{args.family}.gguf")
            write_gguf(
                paths[-1], spec, args.seed, args.family, overwrite=args.overwrite
            )
    except OutputExistsError as error:
        print(f"tinymodel: {error} (--overwrite)", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tinymodel: cannot write {args.out}: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0
