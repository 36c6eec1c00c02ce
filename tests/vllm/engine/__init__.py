# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on a GPU as the judge of the worker side."""
