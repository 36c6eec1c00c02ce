# SPDX-License-Identifier: Apache-2.0
"""Owns the comparison of ranks' running digests, without devices."""

from __future__ import annotations

import pytest

from hotpage.kernels.digest_copies import DivergenceCheck


class Ranks:
    """Digests of three ranks, and a check on one of them."""

    def __init__(self, rank: int) -> None:
        self.found = [(4, 77)] * 3
        self.check = DivergenceCheck(lambda: self.found[rank], lambda own: self.found, rank)


def test_equal_digests_are_no_divergence() -> None:
    ranks = Ranks(1)
    assert [ranks.check.compare() for _ in range(3)] == [False] * 3
    assert (ranks.check.diverged, ranks.check.num_compared) == (False, 3)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "of rank 0 differ from those of rank 2 after 9 lists"),
        (2, "of rank 2 differ from those of rank 0, 1 after 9 lists"),
    ],
)
def test_an_altered_rank_is_reported_once_and_stays_known(
    rank: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(rank)
    ranks.found = [(9, 77), (9, 77), (9, 78)]
    assert ranks.check.compare()
    ranks.found = [(12, 5), (12, 5), (12, 6)]
    assert ranks.check.compare()
    assert caplog.text.count("the copy lists") == 1
    assert text in caplog.text
    assert ranks.check.diverged


def test_ranks_at_different_steps_are_not_compared() -> None:
    ranks = Ranks(0)
    ranks.found = [(9, 77), (9, 77), (10, 78)]
    assert not ranks.check.compare()
    assert (ranks.check.diverged, ranks.check.num_compared) == (False, 0)
