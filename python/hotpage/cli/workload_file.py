# SPDX-License-Identifier: Apache-2.0
"""Owns the flags of commands that read conversations from a file."""

from __future__ import annotations

from hotpage.errors import ConfigError


def turns_of(path: str, tokenizer: str | None, limit: int | None) -> list[list[tuple[int, int]]]:
    """`[(prompt_tokens, output_tokens), ...]` of each conversation; `limit` of them at most.

    Raises:
        ConfigError: one sentence that says what is wrong with the file or the tokenizer.
    """
    from hotpage.workload import count_by_bytes, load_conversations, load_tokenizer

    if not path:
        raise ConfigError("--workload is empty, expected the path of a file")
    count = load_tokenizer(tokenizer) if tokenizer is not None else count_by_bytes
    loaded = load_conversations(path, count=count, limit=limit)
    return [[(t.prompt_tokens, t.output_tokens) for t in one.turns] for one in loaded]
