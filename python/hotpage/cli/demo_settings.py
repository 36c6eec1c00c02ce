# SPDX-License-Identifier: Apache-2.0
"""Owns the flags of `hotpage demo` as settings of the core, and its refusals by flag."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hotpage.errors import ConfigError

MIB = 1 << 20

# Least numbers, stated before the core's own type says that a number is at least 0; every other
# bound is the core's. A test holds them to it.
LEAST = {
    "--conversations": 1,
    "--top-k": 4,
    "--hot-rows": 1,
    "--block-size": 1,
    "--mtp": 0,
    "--ranks": 1,
    "--seed": 0,
}

# Settings of the core by flag.
_SETTINGS = {
    "--scale": "scale",
    "--conversations": "num_conversations",
    "--gpu-pool-mib": "gpu_pool_bytes",
    "--host-pool-mib": "host_pool_bytes",
    "--top-k": "top_k",
    "--hot-rows": "hot_rows",
    "--block-size": "block_size",
    "--layout": "host_layout",
    "--mtp": "num_draft_tokens",
    "--ranks": "num_ranks",
    "--seed": "seed",
}

# Names in a refusal that are no setting, and the flags that they come from.
_FLAGS = {setting: flag for flag, setting in _SETTINGS.items()} | {
    "conversations": "--conversations",
    "gpu_pool_mib": "--gpu-pool-mib",
    "host_pool_mib": "--host-pool-mib",
    "verification rows x top-k": "(--mtp + 1) x --top-k",
}

# What the core can be told, far over every bound of its own.
_MOST = 2**32 - 1

_POOLS = ("--gpu-pool-mib", "--host-pool-mib")


def from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The core's settings of the flags that are given (not None); pools become bytes.

    Raises:
        ConfigError: a number under its least, or a pool that is no size.
    """
    settings: dict[str, Any] = {}
    for flag, value in flags.items():
        if value is None:
            continue
        if flag in LEAST and value < LEAST[flag]:
            raise ConfigError(f"{flag} is {value}, expected at least {LEAST[flag]}; raise it")
        if flag in _POOLS:
            value = _bytes(flag, value)
        elif flag in LEAST and flag != "--seed":
            value = min(value, _MOST)
        settings[_SETTINGS[flag]] = value
    return settings


def _bytes(flag: str, mib: float) -> int:
    if not math.isfinite(mib) or mib <= 0:
        raise ConfigError(f"{flag} is {mib:g}, expected a number above 0; give MiB")
    # More than any memory, and refused by the core with the bound that it has.
    return int(min(mib * MIB, 2.0**63))


@contextmanager
def refusals_by_flag(flags: Mapping[str, Any]) -> Iterator[None]:
    """Makes the core's refusals name flags and, in front, what the user wrote."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(by_flag(str(error), flags)) from error


def by_flag(text: str, flags: Mapping[str, Any]) -> str:
    """A refusal `name is value, expected ...; remedy` of the core with flags for its names.

    A flag that was not given is marked as a default, since the user must not look for it in what
    was typed; a number is repeated as it was given, since the core counts pools in whole MiB and
    numbers in 32 bits.
    """
    name, is_, rest = text.partition(" is ")
    flag = _FLAGS.get(name)
    if not is_ or flag is None:
        return _words(text)
    value, comma, bound = rest.partition(", ")
    given = flags.get(flag)
    if given is None:
        return f"{flag} (not given, so by default) is {value}{comma}{_words(bound)}"
    if flag in _POOLS or flag in LEAST:
        value = f"{given:g}" if isinstance(given, float) else str(given)
    return f"{flag} is {value}{comma}{_words(bound)}"


def _words(text: str) -> str:
    """Names of settings inside a sentence; single words such as "scale" stay words."""
    names = "|".join(re.escape(name) for name in _FLAGS if not name.isalpha())
    return re.sub(rf"\b(?:{names})\b", lambda found: _FLAGS[found[0]], text)
