# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of conversation files: ShareGPT and OpenAI messages, JSON and JSON lines.

Messages become turns by one rule: everything up to an answer is the prompt of a turn, answers in a
row are one answer. What comes after the last answer is dropped, because nothing says how long its
answer would be; an answer that comes first answers an empty prompt, which counts as one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hotpage.errors import ConfigError
from hotpage.user_files import BadFileError, parse_json, read_text
from hotpage.workload.conversation import Conversation, Turn
from hotpage.workload.tokens import TokenCounter, count_by_bytes

_PROMPT_ROLES = frozenset(
    {"user", "human", "system", "developer", "tool", "function", "observation", "function_response"}
)
_ANSWER_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"})

_EXPECTED = (
    'a list of {"conversations": [{"from", "value"}]} (ShareGPT) or {"messages": [{"role", '
    '"content"}]} (OpenAI) is expected'
)


def load_conversations(
    path: str | Path, *, count: TokenCounter = count_by_bytes, limit: int | None = None
) -> list[Conversation]:
    """Reads the conversations of a file, those without an answer left out.

    Args:
        path: JSON (a list, or one conversation) or JSON lines, UTF-8.
        count: tokens of a text; each message is counted by itself, and a prompt or an answer is
            at least one token.
        limit: conversations to return at most.

    Raises:
        ConfigError: one sentence that names the file and what is wrong with it.
    """
    if not str(path):
        raise ConfigError("the path of the conversation file is empty, expected a file's name")
    path = Path(path)
    try:
        conversations: list[Conversation] = []
        for where, record in _records(_read(path)):
            if limit is not None and len(conversations) >= limit:
                break
            turns = tuple(_turns(where, _messages(where, record), count))
            if turns:
                conversations.append(Conversation(turns))
        if not conversations:
            raise BadFileError("no conversation has an answer")
    except BadFileError as error:
        raise ConfigError(f"{path}: {error}") from error
    return conversations


def _read(path: Path) -> str:
    text = read_text(path)
    if not text.strip():
        raise BadFileError(f"the file is empty; {_EXPECTED}")
    return text


def _records(text: str) -> Iterator[tuple[str, Any]]:
    """The conversations of a file, each with words for where it is."""
    try:
        document = parse_json(text)
    except BadFileError as error:
        lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2 or not _is_json_object(lines[0][1]):
            raise
        for at, line in lines:
            try:
                yield f"line {at}", parse_json(line)
            except BadFileError as bad_line:
                raise BadFileError(f"line {at}: {bad_line}") from error
        return
    if isinstance(document, Mapping):
        yield "the conversation", document
    elif isinstance(document, list) and document and _is_message(document[0]):
        yield "the conversation", {"messages": document}
    elif isinstance(document, list):
        for at, record in enumerate(document, 1):
            yield f"conversation {at}", record
    else:
        raise BadFileError(f"it holds {_kind(document)}; {_EXPECTED}")


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), Mapping)
    except BadFileError:
        return False


def _is_message(record: Any) -> bool:
    return isinstance(record, Mapping) and "role" in record and "messages" not in record


def _messages(where: str, record: Any) -> Iterator[tuple[str, str]]:
    """`(role, text)` of each message."""
    if not isinstance(record, Mapping):
        raise BadFileError(f"{where} is {_kind(record)}; {_EXPECTED}")
    if "conversations" in record:
        messages, role_key, text_key = record["conversations"], "from", "value"
    elif "messages" in record:
        messages, role_key, text_key = record["messages"], "role", "content"
    else:
        raise BadFileError(f'{where} has neither "conversations" nor "messages"; {_EXPECTED}')
    if not isinstance(messages, list):
        raise BadFileError(f"{where} has {_kind(messages)} where its list of messages should be")
    for at, message in enumerate(messages, 1):
        here = f"{where}, message {at}"
        if not isinstance(message, Mapping):
            raise BadFileError(f"{here} is {_kind(message)}, an object is expected")
        role = message.get(role_key)
        if not isinstance(role, str):
            raise BadFileError(f'{here} has no "{role_key}"')
        if role.lower() not in _PROMPT_ROLES | _ANSWER_ROLES:
            raise BadFileError(f'{here} has the unknown "{role_key}" {role[:40]!r}')
        has_calls = bool(message.get("tool_calls") or message.get("function_call"))
        if text_key not in message and not has_calls:
            raise BadFileError(f'{here} has no "{text_key}"')
        yield role.lower(), _text(here, message.get(text_key)) + _calls(here, message)


def _text(where: str, content: Any) -> str:
    """The text of a message; parts that are no text (images, audio) have none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadFileError(f"{where} has {_kind(content)} as content, a text or a list is expected")
    texts = []
    for part in content:
        text = part.get("text", "") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise BadFileError(f"{where} has a content part without text: {_kind(text)}")
        texts.append(text)
    return "".join(texts)


def _calls(where: str, message: Mapping[str, Any]) -> str:
    """Names and arguments of a message's tool calls, which the model writes like any text."""
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    if not isinstance(calls, list):
        raise BadFileError(f"{where} has {_kind(calls)} as tool calls, a list is expected")
    texts = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadFileError(f"{where} has a tool call without a function")
        for value in (function.get("name", ""), function.get("arguments", "")):
            texts.append(value if isinstance(value, str) else json.dumps(value))
    return "".join(texts)


def _turns(where: str, messages: Iterator[tuple[str, str]], count: TokenCounter) -> Iterator[Turn]:
    prompt = output = 0
    answered = False
    for role, text in messages:
        tokens = count(text) if text else 0
        if role in _ANSWER_ROLES:
            output += tokens
            answered = True
        else:
            if answered:
                yield Turn(max(prompt, 1), max(output, 1))
                prompt = output = 0
                answered = False
            prompt += tokens
    if answered:
        yield Turn(max(prompt, 1), max(output, 1))


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
