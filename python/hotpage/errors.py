# SPDX-License-Identifier: Apache-2.0
"""Owns every exception class of the package; imports nothing of it."""

from __future__ import annotations


class HotPageError(Exception):
    """Base of all errors that the package raises on purpose."""


class ConfigError(HotPageError, ValueError):
    """A setting cannot work; raised at start only, the text says what to change."""


class UnsupportedVllmError(ConfigError):
    """The installed vLLM is not one whose internals are known."""


class CapacityError(HotPageError, RuntimeError):
    """A pool cannot hold even one request; raised at start only."""


class ProtocolError(HotPageError, RuntimeError):
    """The caller broke the event protocol; the state is as it was before the call."""


class RankError(HotPageError, RuntimeError):
    """Another rank of this host failed, ended or did not come in time; the text says which."""


class InvariantError(HotPageError, RuntimeError):
    """An internal rule does not hold: a bug in hotpage, and a reason to stop the engine."""


class KernelError(HotPageError, RuntimeError):
    """A call into the kernel library returned a status other than success.

    Args:
        op: name of the operation, without the `hotpage_` prefix.
        status: the status as the C ABI returned it.
        text: the library's text for the status.
        params: summary of the parameters, empty where there are none.
    """

    def __init__(self, op: str, status: int, text: str, params: str = "") -> None:
        # All four go to Exception so that the error can be pickled between vLLM's processes.
        super().__init__(op, status, text, params)
        self.op = op
        self.status = status
        self.text = text
        self.params = params

    def __str__(self) -> str:
        suffix = f" ({self.params})" if self.params else ""
        return f"{self.op} failed with status {self.status}: {self.text}{suffix}"


class KernelUnavailableError(HotPageError, ImportError):
    """There is no usable kernel library; the text says the command that fixes it."""
