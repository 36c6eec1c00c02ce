# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one host have in common at run time: meetings, events, each other's memory."""
