# SPDX-License-Identifier: Apache-2.0
"""Owns `python -m hotpage`."""

from hotpage.cli import main

main()
