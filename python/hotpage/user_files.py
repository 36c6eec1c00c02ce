# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of files that a user names: regular, of bounded size, UTF-8, and JSON.

What is wrong is said without the file's name, which the caller puts before it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30
"""Largest file that is read; a program that reads conversations holds them all in memory."""


class BadFileError(Exception):
    """What is wrong with a file, without its name."""


def read_text(path: Path) -> str:
    """The text of a file, a byte order mark left out.

    Raises:
        BadFileError: it cannot be read, is no regular file, has more than `MAX_BYTES` bytes or is
            not UTF-8.
    """
    try:
        # Before it is opened, because opening a pipe waits for its writer.
        _check(path.stat())
        data = path.read_bytes()
    except OSError as error:
        raise BadFileError(error.strerror or str(error)) from error
    except ValueError as error:
        # A name with a zero byte.
        raise BadFileError(str(error)) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFileError(f"not UTF-8 at byte {error.start}") from error


def _check(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise BadFileError("Is a directory; give a file")
    if not stat.S_ISREG(found.st_mode):
        raise BadFileError("it is not a regular file; copy what it gives to one")
    if found.st_size > MAX_BYTES:
        raise BadFileError(
            f"it has {found.st_size:,} bytes, expected at most {MAX_BYTES:,}; give a part of it"
        )


def parse_json(text: str) -> Any:
    """The value that a JSON text holds.

    Raises:
        BadFileError: it is not JSON, is nested too deeply or has a number too long to read.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadFileError(
            f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise BadFileError("the JSON is nested too deeply") from error
    except ValueError as error:
        # For example an integer of thousands of digits.
        raise BadFileError(f"not JSON that can be read: {error}") from error
