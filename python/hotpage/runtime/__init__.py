# SPDX-License-Identifier: Apache-2.0
"""Owns streams, events and the transfers put on them; knows torch and the kernels, no vLLM."""
