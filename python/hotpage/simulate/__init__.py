# SPDX-License-Identifier: Apache-2.0
"""Owns the Python side of the deployment simulator: constants with sources, reports and plots.

The run itself is the Rust core's; memory and block sizes are the planner's. Nothing here decides
what runs or how long it takes.
"""

from hotpage.simulate.request import Simulated, answer

__all__ = ["Simulated", "answer"]
