# SPDX-License-Identifier: Apache-2.0
"""Conversations as numbers of tokens, and the files they are read from; no engine, no core."""

from hotpage.workload.conversation import Conversation, Turn
from hotpage.workload.files import load_conversations
from hotpage.workload.tokens import TokenCounter, count_by_bytes, load_tokenizer

__all__ = [
    "Conversation",
    "TokenCounter",
    "Turn",
    "count_by_bytes",
    "load_conversations",
    "load_tokenizer",
]
