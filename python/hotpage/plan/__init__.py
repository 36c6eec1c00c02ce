# SPDX-License-Identifier: Apache-2.0
"""Owns the capacity planner's Python side: profiles, configuration files, reports and plots.

The arithmetic is in the Rust crate `hotpage-plan`; nothing here computes a capacity.
"""

from hotpage.plan.profiles import GPUS, MODELS, Gpu, Model, find_gpu, find_model
from hotpage.plan.request import Request, answer

__all__ = ["GPUS", "MODELS", "Gpu", "Model", "Request", "answer", "find_gpu", "find_model"]
