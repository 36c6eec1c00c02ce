# SPDX-License-Identifier: Apache-2.0
"""Owns the import path of the helpers beside the tests of the adapter."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
