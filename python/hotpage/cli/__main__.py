# SPDX-License-Identifier: Apache-2.0
"""Owns `python -m hotpage.cli`."""

from hotpage.cli import main

main()
