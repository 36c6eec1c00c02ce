# SPDX-License-Identifier: Apache-2.0
"""Types of the Rust extension module; rust/python owns the definitions."""

__version__: str
"""Version of the crates, equal to `hotpage.__version__`."""
