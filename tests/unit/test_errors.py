# SPDX-License-Identifier: Apache-2.0
"""Owns the table of exception classes that callers write `except` clauses against."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hotpage import errors

TABLE = {
    "HotPageError": {Exception},
    "ConfigError": {errors.HotPageError, ValueError},
    "UnsupportedVllmError": {errors.ConfigError},
    "CapacityError": {errors.HotPageError, RuntimeError},
    "ProtocolError": {errors.HotPageError, RuntimeError},
    "RankError": {errors.HotPageError, RuntimeError},
    "InvariantError": {errors.HotPageError, RuntimeError},
    "KernelError": {errors.HotPageError, RuntimeError},
    "KernelUnavailableError": {errors.HotPageError, ImportError},
}


def _declared() -> dict[str, type]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {name: one for name, one in classes if one.__module__ == errors.__name__}


def test_every_class_is_in_the_table_with_exactly_these_bases() -> None:
    assert {name: set(one.__bases__) for name, one in _declared().items()} == TABLE


def test_no_class_escapes_except_exception() -> None:
    assert all(issubclass(one, errors.HotPageError) for one in _declared().values())


def test_a_kernel_error_names_op_status_text_and_parameters() -> None:
    error = errors.KernelError("fill", 2, "a field is out of range", "address=0")
    assert str(error) == "fill failed with status 2: a field is out of range (address=0)"


@pytest.mark.parametrize("params", ["", "device=3"])
def test_a_kernel_error_survives_pickling(params: str) -> None:
    error = pickle.loads(
        pickle.dumps(errors.KernelError("query_device", 1100, "no device", params))
    )
    assert (error.op, error.status, error.text, error.params) == (
        "query_device",
        1100,
        "no device",
        params,
    )
