# SPDX-License-Identifier: Apache-2.0
"""Owns streams and events, what is put on them, and what the ranks of a host share; no vLLM."""
