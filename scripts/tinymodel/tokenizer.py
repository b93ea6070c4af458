# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The byte-level BPE tokenizer that goes with every tiny checkpoint."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tinymodel import vocab

# One leading space belongs to the word; digits and line ends stand alone.
_WORDS = r"\s?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]+|\s"

_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def build() -> Tokenizer:
    """Returns the tokenizer; it has exactly `vocab.SIZE` tokens."""
    ids = vocab.token_ids()
    tokenizer = Tokenizer(BPE(vocab=ids, merges=vocab.merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in vocab.CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in vocab.MARKUP]
    )
    return tokenizer


def write(directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template."""
    build().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = _TEMPLATE.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
