# SPDX-License-Identifier: Apache-2.0
"""Owns the ways to count the tokens of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hotpage.errors import ConfigError

TokenCounter: TypeAlias = Callable[[str], int]
"""Tokens of a text; 0 for the empty one."""

BYTES_PER_TOKEN = 4


def count_by_bytes(text: str) -> int:
    """One token for every 4 bytes of UTF-8 that have begun.

    A rule of thumb for English text with current vocabularies; a workload's shape matters here,
    not its exact length.
    """
    # JSON may hold lone surrogates, which UTF-8 has no bytes for: counted as the three that they
    # would take.
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    return -(-num_bytes // BYTES_PER_TOKEN)


def load_tokenizer(name_or_path: str) -> TokenCounter:
    """The counter of a Hugging Face tokenizer, special tokens not counted.

    Raises:
        ConfigError: transformers is not installed, or has no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "counting with a tokenizer needs transformers; run pip install 'hotpage[tokenizer]' "
            "or leave --tokenizer away"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except Exception as error:  # Its loaders raise whatever the file formats raise.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"there is no tokenizer {name_or_path!r}: {reason}") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count
