# SPDX-License-Identifier: Apache-2.0
"""Conversation files become turns by the stated rules; bad files are one clear sentence."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hotpage.errors import ConfigError
from hotpage.workload import Conversation, Turn, count_by_bytes, load_conversations, load_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(content: Any) -> Path:
        path = tmp_path / "chats.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
        return path

    return write_file


def sharegpt(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in messages]}


def openai(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def turns(conversations: list[Conversation]) -> list[list[tuple[int, int]]]:
    return [[(t.prompt_tokens, t.output_tokens) for t in c.turns] for c in conversations]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("a", 1),
        ("abcd", 1),
        ("abcde", 2),
        ("äöü", 2),
        ("日本語", 3),
        ("🙂", 1),
        ("\ud800", 1),
    ],
)
def test_tokens_are_quarters_of_the_utf8_bytes_rounded_up(text: str, tokens: int) -> None:
    assert count_by_bytes(text) == tokens


def test_sharegpt_turns_hold_new_tokens_only(write: Any) -> None:
    path = write(
        [
            sharegpt(("human", "a" * 40), ("gpt", "b" * 8), ("human", "c" * 4), ("gpt", "d")),
            sharegpt(("human", "e" * 4), ("gpt", "f" * 400)),
        ]
    )
    loaded = load_conversations(path)
    assert loaded[0] == Conversation((Turn(10, 2), Turn(1, 1)))
    assert turns(loaded) == [[(10, 2), (1, 1)], [(1, 100)]]
    assert loaded[0].num_tokens == 14
    assert turns(load_conversations(path, limit=1)) == [[(10, 2), (1, 1)]]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(
            openai(("system", "s" * 8), ("user", "u" * 4), ("assistant", "a" * 4)),
            [(3, 1)],
            id="a system message belongs to the first prompt",
        ),
        pytest.param(
            openai(("user", "a" * 4), ("user", "b" * 5), ("assistant", "c"), ("assistant", "d")),
            [(3, 2)],
            id="messages of one side in a row are one",
        ),
        pytest.param(
            openai(("user", "a"), ("assistant", "b"), ("user", "c" * 400)),
            [(1, 1)],
            id="a prompt without an answer is dropped",
        ),
        pytest.param(
            openai(("assistant", "a" * 8), ("user", "b"), ("assistant", "c")),
            [(1, 2), (1, 1)],
            id="an answer that comes first has an empty prompt of one token",
        ),
        pytest.param(
            openai(("user", ""), ("assistant", "")), [(1, 1)], id="empty texts are one token"
        ),
        pytest.param(
            openai(("user", None), ("assistant", "x")), [(1, 1)], id="null content is empty"
        ),
        pytest.param(
            openai(
                (
                    "user",
                    [
                        {"type": "text", "text": "a" * 8},
                        {"type": "image_url", "image_url": {"url": "data:" + "x" * 999}},
                        {"type": "text", "text": "b" * 4},
                    ],
                ),
                ("assistant", [{"type": "text", "text": "c" * 12}]),
            ),
            [(3, 3)],
            id="of a list of parts the texts count",
        ),
        pytest.param(openai(("user", "日本語" * 4), ("assistant", "🙂🙂")), [(9, 2)], id="unicode"),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": "what is the weather"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "weather", "arguments": "{}..."}}],
                    },
                    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
                    {"role": "assistant", "content": "It is sunny."},
                ]
            },
            [(5, 3), (2, 3)],
            id="tool calls are answers and their results prompts",
        ),
        pytest.param(
            sharegpt(("system", "a" * 4), ("Human", "b" * 4), ("GPT", "c")),
            [(2, 1)],
            id="sharegpt roles in any case",
        ),
    ],
)
def test_odd_conversations_follow_the_rules(write: Any, record: Any, expected: Any) -> None:
    assert turns(load_conversations(write([record]))) == [expected]


def test_one_object_a_list_of_messages_and_json_lines_are_read_too(write: Any) -> None:
    one = openai(("user", "a"), ("assistant", "b" * 8))
    assert turns(load_conversations(write(one))) == [[(1, 2)]]
    assert turns(load_conversations(write(one["messages"]))) == [[(1, 2)]]
    lines = json.dumps(one) + "\n\n" + json.dumps(sharegpt(("human", "a"), ("gpt", "b"))) + "\r\n"
    assert turns(load_conversations(write(lines))) == [[(1, 2)], [(1, 1)]]
    with_mark = b"\xef\xbb\xbf" + json.dumps(one).encode()
    assert turns(load_conversations(write(with_mark))) == [[(1, 2)]]


def test_conversations_without_an_answer_are_left_out(write: Any) -> None:
    empty, unanswered = {"conversations": []}, openai(("user", "a"))
    kept = openai(("user", "a"), ("assistant", "b"))
    assert turns(load_conversations(write([empty, unanswered, kept]))) == [[(1, 1)]]


MESSAGE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "the file is empty; a list of"),
        (" \n", "the file is empty"),
        ("[]", "no conversation has an answer"),
        ("hello", "not JSON at line 1, column 1: Expecting value"),
        ('[{"messages": [', "not JSON at line 1, column 16"),
        ("42", "it holds a number; a list of"),
        ('"text"', "it holds a text; a list of"),
        ("null", "it holds null"),
        ("[1]", "conversation 1 is a number; a list of"),
        ("{}", 'the conversation has neither "conversations" nor "messages"'),
        ('[{"messages": {}}]', "conversation 1 has an object where its list of messages should be"),
        ('[{"messages": ["hi"]}]', "conversation 1, message 1 is a text, an object is expected"),
        ('[{"messages": [{"content": "a"}]}]', 'conversation 1, message 1 has no "role"'),
        ('[{"messages": [{"role": "user"}]}]', 'conversation 1, message 1 has no "content"'),
        ('{"messages": [{"role": "oracle", "content": ""}]}', "the unknown \"role\" 'oracle'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "has a number as content"),
        ('{"messages": [{"role": "user", "content": [3]}]}', "a content part without text"),
        ('{"conversations": [{"from": 1, "value": ""}]}', 'message 1 has no "from"'),
        (MESSAGE + "\n{oops}\n", "line 2: not JSON at line 1, column 2"),
        (MESSAGE + "\n[]\n", "line 2 is a list; a list of"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        ("[" * 100_000, "the JSON is nested too deeply"),
        ("1" * 5_000, "not JSON that can be read"),
        ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}', "a tool call without"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_name(write: Any, content: Any, text: str) -> None:
    path = write(content)
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        load_conversations(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json: No such file or directory"):
        load_conversations(tmp_path / "gone.json")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: Is a directory")):
        load_conversations(tmp_path)


class WordTokenizer:
    """Stands in for a Hugging Face tokenizer: one token a word, two special ones around."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words = [1] * len(text.split())
        return [0, *words, 2] if add_special_tokens else words

    @classmethod
    def from_pretrained(cls, name: str) -> WordTokenizer:
        if name != "words":
            raise OSError(f"{name} is not a local folder\nand many more lines")
        return cls()


def test_a_tokenizer_counts_instead_and_its_special_tokens_do_not(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("transformers")
    module.AutoTokenizer = WordTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    path = write(openai(("user", "one two three"), ("assistant", "four")))
    assert turns(load_conversations(path, count=load_tokenizer("words"))) == [[(3, 1)]]
    with pytest.raises(ConfigError, match=r"no tokenizer 'other': other is not a local folder$"):
        load_tokenizer("other")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'hotpage[tokenizer]'")):
        load_tokenizer("words")


def test_what_is_no_regular_file_of_bounded_size_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/zero: it is not a regular file; "):
        load_conversations("/dev/zero")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe: it is not a regular file; "):
        load_conversations(pipe)
    with pytest.raises(ConfigError, match="Is a directory; give a file"):
        load_conversations(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(ConfigError, match="it has 1,073,741,825 bytes, expected at most 1,073"):
        load_conversations(huge)
    with pytest.raises(ConfigError, match="path of the conversation file is empty"):
        load_conversations("")
    with pytest.raises(ConfigError, match="null byte"):
        load_conversations("a\0b")
