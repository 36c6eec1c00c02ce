# SPDX-License-Identifier: Apache-2.0
"""Keeps more sparse-attention requests running by giving up KV residency page by page.

Importing the package loads neither the Rust core nor the kernels, torch or vLLM.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
