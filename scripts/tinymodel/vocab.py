# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The tiny models' vocabulary: bytes, a few English merges, Flint's markers.

The merges are spelled out by a word list instead of being trained, so that the
vocabulary cannot change with the version of a tokenizer library.
"""

SIZE = 512

# Control tokens: never part of the decoded text.
CONTROL = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
# Markup that parsers read, so decoding must keep it.
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)

_WORDS = (
    "the of and to in is that for with as was on are this you it be at by have "
    "from or had not but what all were when we there can an your which their said "
    "if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who "
    "now people my made over did down only way find use may water long little very "
    "after words called just where most know get through back much go good new "
    "write our used me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number"
)


def byte_symbols() -> list[str]:
    """Returns the 256 printable stand-ins of byte-level BPE, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    keep = set(printable)
    return [chr(b if b in keep else next(spare)) for b in range(256)]


def merges() -> list[tuple[str, str]]:
    """Returns as many merges as the vocabulary has room for, in rank order."""
    room = SIZE - 256 - len(CONTROL) - len(MARKUP)
    space = byte_symbols()[0x20]
    found: dict[str, tuple[str, str]] = {}
    for word in _WORDS.split():
        token = space
        for letter in word:
            found.setdefault(token + letter, (token, letter))
            token += letter
    pairs = list(found.values())
    if len(pairs) < room:
        raise AssertionError(f"the word list gives {len(pairs)} merges of {room}")
    return pairs[:room]


def token_ids() -> dict[str, int]:
    """Returns every token with its id: bytes, merges, control tokens, markup."""
    tokens = [*byte_symbols(), *(a + b for a, b in merges()), *CONTROL, *MARKUP]
    return {token: index for index, token in enumerate(tokens)}


_IDS = token_ids()
EOS_IDS = tuple(_IDS[t] for t in ("<|endoftext|>", "<|user|>", "<|observation|>"))
PAD_ID = _IDS["<|endoftext|>"]
