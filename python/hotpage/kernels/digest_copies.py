# SPDX-License-Identifier: Apache-2.0
"""Owns the op digest_copies, and the comparison of ranks' digests.

Ranks that resolve equal inputs have equal copy lists. A running digest of all of them costs one
small launch a list and is compared now and then, off the steps' path. Cooperative copies need no
such launch: `Channel.counts` has the same digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_contiguous, check_tensor
from hotpage.kernels.replay_copy import CopyList, usable_library

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

AllGather = Callable[[tuple[int, int]], Sequence[tuple[int, int]]]
"""Gives every rank's (lists, digest), in the order of ranks."""


class DigestCopies:
    """digest_copies bound to a copy list and a running digest.

    Args:
        copies: the list that an earlier resolve on the same stream wrote.
        digest: int64 `[4]` on the list's device, zero at first: digest of all lists so far, their
            number, and two words for the kernel. Ops on one stream may share it.
        index_group: number of the index group; lists of different groups have different digests.

    Raises:
        ConfigError: a tensor that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(self, copies: CopyList, digest: torch.Tensor, *, index_group: int = 0) -> None:
        device = copies.count.device
        num_requests, length = (int(size) for size in copies.host_row.shape)
        check_tensor("copies.count", copies.count, "int32", (num_requests,), device)
        check_tensor("copies.host_row", copies.host_row, "int32", (num_requests, length), device)
        check_contiguous("copies.host_row", copies.host_row)
        check_tensor("digest", digest, "int64", (4,), device)
        self.params = _abi.DigestCopiesParams(
            num_requests=num_requests,
            copy_list_stride=length,
            salt=index_group,
            copy_host_row=copies.host_row.data_ptr(),
            copy_count=copies.count.data_ptr(),
            digest=digest.data_ptr(),
            scratch=digest.data_ptr() + 16,
        )
        self._library, _ = usable_library(device)
        self._tensors = (copies, digest)

    def __call__(self, stream: int) -> None:
        """Enqueues the digest on a stream (torch's `stream.cuda_stream`). May be capturing.

        Raises:
            KernelError: the launch failed.
        """
        self._library.launch("hotpage_digest_copies", self.params, stream)


class DivergenceCheck:
    """Compares this rank's running digest with the other ranks' and says so once if they differ.

    From the first difference on digests stay different, so one report is all there is to say.

    Args:
        read: this rank's (lists, digest) so far; may wait for the device.
        all_gather: exchanges them between ranks, called by all of them.
        rank: this rank.
    """

    def __init__(
        self, read: Callable[[], tuple[int, int]], all_gather: AllGather, rank: int
    ) -> None:
        self._read, self._all_gather, self._rank = read, all_gather, rank
        self.diverged = False
        """Whether digests ever differed."""
        self.num_compared = 0
        """Comparisons in which all ranks had digested as many lists."""

    def compare(self) -> bool:
        """Whether this comparison found a difference. Every rank calls it after the same step.

        Ranks that have digested different numbers of lists are not compared.
        """
        found = list(self._all_gather(self._read()))
        if len({lists for lists, _ in found}) != 1:
            return False
        self.num_compared += 1
        differs = len({digest for _, digest in found}) != 1
        if differs and not self.diverged:
            others = [rank for rank, seen in enumerate(found) if seen != found[self._rank]]
            logger.error(
                "the copy lists of rank %d differ from those of rank %s after %d lists: ranks do "
                "not resolve the same inputs, and each fetches its own rows where they differ",
                self._rank,
                ", ".join(map(str, others)) or "none, but other ranks differ",
                found[0][0],
            )
        self.diverged = self.diverged or differs
        return differs


def read_digest(digest: torch.Tensor) -> tuple[int, int]:
    """(lists, digest) of a running digest, int64 `[4]`; waits for the current stream."""
    value, lists = digest[:2].tolist()
    return lists, value % (1 << 64)
