# SPDX-License-Identifier: Apache-2.0
"""Python face of the CUDA kernels; imports without the Rust core, torch and vLLM."""

from hotpage.kernels._library import Library, load

__all__ = ["Library", "load"]
