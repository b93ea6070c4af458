# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Makes the stored logits of the tiny models with transformers' own Flint class.

It needs an environment of its own, because the engine's transformers is older
than the Flint class:

    python3 -m venv reference-env
    reference-env/bin/pip install -r requirements/reference.txt
    reference-env/bin/python scripts/make_reference.py

Before it computes anything it checks that the class loads our checkpoint with no
missing or unexpected tensor, and saves it under the same names with the same
values.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from tqdm import tqdm

from tinymodel import SPECS, write_safetensors
from tinymodel.reference import (
    GREEDY_TOKENS,
    TOP,
    PromptReference,
    save_reference,
)
from tinymodel.weights import checksum

FLINT_CLASS = "FlintForCausalLM"
SEED = 0
FAMILIES = ("bf16", "nvfp4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Lengths on both sides of the window (17 and 513) and well past it, each with the
# number of the first draw whose greedy continuations have wide margins.
PROMPTS = {
    "tiny": ((5, 0), (17, 0), (18, 0), (40, 5), (100, 1), (160, 3)),
    "heads": ((9, 1), (514, 2), (620, 1)),
}
# A float32 engine errs by less than 1e-4, so it cannot pick another token.
SMALLEST_MARGIN = 0.02
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "reference"


class CheckFailedError(RuntimeError):
    """The Flint class and our checkpoint, or two of its results, disagree."""


def prompts(spec_name: str) -> list[list[int]]:
    """Returns the prompts of a spec: token ids drawn from the whole vocabulary."""
    drawn = []
    for length, draw in PROMPTS[spec_name]:
        stream = np.random.PCG64(np.random.SeedSequence([SEED, length, draw]))
        ids = stream.random_raw(length) % np.uint64(SPECS[spec_name].vocab_size)
        drawn.append(ids.tolist())
    return drawn


def load_model(checkpoint: Path, dtype: torch.dtype) -> Any:
    """Loads the checkpoint with the Flint class, with nothing missing or left."""
    model, report = getattr(transformers, FLINT_CLASS).from_pretrained(
        checkpoint,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for kind, found in report.items():
        if found:
            raise CheckFailedError(f"{checkpoint.name}: {kind} on loading: {found}")
    # It replaces the checkpoint's, which samples and stops at an end-of-text token.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=GREEDY_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=model.config.pad_token_id,
    )
    return model.eval()


def check_names(model: Any, checkpoint: Path, work: Path) -> None:
    """Checks that the class saves what it loaded: names, shapes and values."""
    saved_dir = work / "saved"
    model.save_pretrained(saved_dir)
    ours = safetensors.torch.load_file(checkpoint / "model.safetensors")
    saved = safetensors.torch.load_file(saved_dir / "model.safetensors")
    if ours.keys() != saved.keys():
        names = sorted(ours.keys() ^ saved.keys())
        raise CheckFailedError(f"{checkpoint.name}: only one side has {names}")
    for name, value in ours.items():
        if not torch.equal(value.float(), saved[name].float()):
            raise CheckFailedError(f"{checkpoint.name}: {name} was saved differently")
    shutil.rmtree(saved_dir)


@torch.inference_mode()
def run_prompt(model: Any, prompt: list[int]) -> PromptReference:
    """Computes one prompt's log-probabilities and greedy continuation."""
    ids = torch.tensor([prompt])
    logprobs = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    top = logprobs.topk(TOP)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids))
    greedy = generated.sequences[0, len(prompt) :]
    logits = torch.cat(generated.logits).double()
    best = logits.topk(2).values
    picked = logits.log_softmax(-1).gather(1, greedy[:, None])
    return PromptReference(
        prompt_ids=np.array(prompt, np.int16),
        token_logprobs=logprobs.gather(1, ids[0, 1:, None])[:, 0].float().numpy(),
        top_ids=top.indices.short().numpy(),
        top_logprobs=top.values.float().numpy(),
        greedy_ids=greedy.short().numpy(),
        greedy_logprobs=picked[:, 0].float().numpy(),
        greedy_margins=(best[:, 0] - best[:, 1]).float().numpy(),
    )


def check_greedy(model: Any, reference: PromptReference) -> None:
    """Checks a float32 continuation: wide margins, and the same without a cache."""
    if (margin := reference.greedy_margins.min()) < SMALLEST_MARGIN:
        raise CheckFailedError(f"a greedy margin is only {margin}: pick other prompts")
    ids = np.concatenate((reference.prompt_ids, reference.greedy_ids)).tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    logprobs = logits.log_softmax(-1)[len(reference.prompt_ids) - 1 : -1]
    greedy = torch.from_numpy(reference.greedy_ids).long()
    if not torch.equal(logprobs.argmax(-1), greedy):
        raise CheckFailedError("greedy tokens change when the cache is not used")
    picked = logprobs.gather(1, greedy[:, None])[:, 0]
    error = (picked - torch.from_numpy(reference.greedy_logprobs)).abs().max().item()
    if error > 1e-4:
        raise CheckFailedError(f"greedy log-probabilities depend on the cache: {error}")


def cases(out: Path, work: Path, bar: tqdm) -> Iterator[dict[str, Any]]:
    """Makes each case's file in `out`; yields its entry in the index."""
    for spec_name, spec in SPECS.items():
        for family in FAMILIES:
            checkpoint = work / f"{spec_name}-{family}"
            write_safetensors(checkpoint, spec, SEED, family)
            results: dict[str, list[PromptReference]] = {}
            for dtype_name, dtype in DTYPES.items():
                model = load_model(checkpoint, dtype)
                check_names(model, checkpoint, work)
                results[dtype_name] = []
                for prompt in prompts(spec_name):
                    bar.set_description(f"{spec_name} {family} {dtype_name}")
                    results[dtype_name].append(run_prompt(model, prompt))
                    if dtype == torch.float32:
                        check_greedy(model, results[dtype_name][-1])
                    bar.update(len(prompt))
            path = out / f"{spec_name}-{family}.safetensors"
            save_reference(path, results)
            yield {
                "spec": spec_name,
                "family": family,
                "file": path.name,
                "weights_sha256": checksum(spec, SEED, family),
                "smallest_greedy_margin": {
                    name: float(min(r.greedy_margins.min() for r in references))
                    for name, references in results.items()
                },
            }


def make(out: Path) -> dict[str, Any]:
    """Makes every file of the reference in `out`; returns the index.

    The files replace older ones when all of them are made, or not at all.
    """
    tokens = sum(length for drawn in PROMPTS.values() for length, _ in drawn)
    total = len(FAMILIES) * len(DTYPES) * tokens
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".reference.", dir=out) as stage,
        tqdm(total=total, unit="token") as bar,
    ):
        fresh, work = Path(stage) / "new", Path(stage) / "work"
        fresh.mkdir()
        index = {
            "command": "python scripts/make_reference.py",
            "seed": SEED,
            "attention": "eager",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "cases": list(cases(fresh, work, bar)),
        }
        text = json.dumps(index, indent=2) + "\n"
        (fresh / "index.json").write_text(text, encoding="utf-8")
        for path in fresh.iterdir():
            path.replace(out / path.name)
    return index


def main() -> int:
    """Runs the command; returns 0, or 1 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    if not hasattr(transformers, FLINT_CLASS):
        print(
            f"make_reference: transformers {transformers.__version__} has no Flint "
            "class: install 5.23 or later (requirements/reference.txt)",
            file=sys.stderr,
        )
        return 1
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        index = make(args.out)
    except KeyboardInterrupt:
        print("make_reference: interrupted, nothing was written", file=sys.stderr)
        return 130
    except (CheckFailedError, OSError) as error:
        print(f"make_reference: {error}", file=sys.stderr)
        return 1
    print(f"{'spec':<8}{'family':<8}{'smallest greedy margin, float32':>32}")
    for case in index["cases"]:
        margin = case["smallest_greedy_margin"]["float32"]
        print(f"{case['spec']:<8}{case['family']:<8}{margin:>32.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
