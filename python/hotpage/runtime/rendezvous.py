# SPDX-License-Identifier: Apache-2.0
"""Owns the meetings of the ranks of one host: collective calls between processes, without CUDA.

Rank 0 listens on an abstract Unix socket, which leaves nothing in any file system. A rank that
fails says so, and one that dies closes its socket, so nobody waits for either.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from hotpage.errors import ConfigError, ProtocolError, RankError

_HEADER = struct.Struct("!I")
_MOST_BYTES = 64 << 20
_RETRY_S = 0.02
_GRACE_S = 0.5
_CREDENTIALS = struct.Struct("3i")


class _Link:
    """A connection to one rank; messages are JSON."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection, self.rank = connection, rank

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._errors():
            self.connection.sendall(_HEADER.pack(len(data)) + data)

    def receive(self, deadline: float) -> dict[str, Any]:
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        if size > _MOST_BYTES:
            raise ProtocolError(f"rank {self.rank} sent a message of {size} bytes")
        return json.loads(self._exactly(size, deadline))

    def _exactly(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self.wait(deadline)
            with self._errors():
                part = self.connection.recv(size - len(parts))
            if not part:
                raise RankError(f"rank {self.rank} has ended")
            parts += part
        return bytes(parts)

    def wait(self, deadline: float) -> None:
        """Until there is something to read."""
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self.connection], [], [], left)[0]:
            raise RankError(f"rank {self.rank} did not come in time")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RankError(f"rank {self.rank} has ended ({error})") from error

    def send_fd(self, fd: int) -> None:
        data = array.array("i", [fd])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)]
        with self._errors():
            self.connection.sendmsg([b"f"], ancillary)

    def receive_fd(self, deadline: float) -> int:
        self.wait(deadline)
        size = array.array("i").itemsize
        space = socket.CMSG_SPACE(size)
        with self._errors():
            _, ancillary, _, _ = self.connection.recvmsg(1, space)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                return array.array("i", data[:size])[0]
        raise RankError(f"rank {self.rank} has ended")

    def has_ended(self) -> bool:
        """Whether the other side has closed, whatever of it is still there to be read."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def last_words(self) -> str:
        """Why the other side, which has closed, left; takes what it sent."""
        with contextlib.suppress(RankError, ProtocolError, ValueError):
            while True:
                message = self.receive(time.monotonic())
                if "failed" in message:
                    return message["failed"]
        return f"rank {self.rank} has ended"


class Rendezvous:
    """Collective calls of the ranks of one host. All ranks make the same calls in the same order.

    As a context manager it tells the other ranks when its body raises, so that they raise
    `RankError` with the reason at their next call, or in the one that they wait in.

    Args:
        name: of the group, the same for its ranks and no other's on this host: a random word that
            the ranks share, say.
        rank: this rank, from 0.
        num_ranks: ranks of the group.
        join_s: seconds to wait for all ranks to join.
        call_s: seconds that a call waits for the others.

    Raises:
        RankError: a rank did not join in time, or failed.
        ConfigError: the name is taken, or the rank is none of the group's.
    """

    def __init__(
        self, name: str, rank: int, num_ranks: int, *, join_s: float = 60.0, call_s: float = 600.0
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank is {rank}, expected 0 to {num_ranks - 1}")
        self.rank, self.num_ranks = rank, num_ranks
        self._call_s = call_s
        self._num_calls = 0
        self._links: list[_Link] = []
        self._listener: socket.socket | None = None
        self._failed: str | None = None
        address = f"\0hotpage-{name}"
        try:
            if num_ranks > 1:
                (self._listen if rank == 0 else self._join)(address, time.monotonic() + join_s)
        except BaseException as error:
            self._leave(str(error))
            raise

    def _listen(self, address: str, deadline: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                raise ConfigError(
                    f"the ranks' meeting point {address[1:]!r} is taken: {error}"
                ) from error
            listener.listen(self.num_ranks)
            missing = set(range(1, self.num_ranks))
            while missing:
                left = max(0.0, deadline - time.monotonic())
                if not select.select([listener], [], [], left)[0]:
                    raise RankError(f"rank {min(missing)} did not join in time")
                connection, _ = listener.accept()
                link = self._admit(connection, missing, deadline)
                if link is not None:
                    missing.remove(link.rank)
                    self._links.append(link)
        self._links.sort(key=lambda link: link.rank)
        for link in self._links:
            link.send({"joined": self.num_ranks})

    def _admit(self, connection: socket.socket, missing: set[int], deadline: float) -> _Link | None:
        """The link to a rank that is missing; None for anybody else, who is turned away."""
        size = _CREDENTIALS.size
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
            try:
                hello = _Link(connection, -1).receive(min(deadline, time.monotonic() + 1))
            except (RankError, ProtocolError, ValueError):
                hello = {}
            if hello.get("ranks") == self.num_ranks and hello.get("rank") in missing:
                return _Link(connection, hello["rank"])
        connection.close()
        return None

    def _join(self, address: str, deadline: float) -> None:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(address)
                break
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise RankError(f"rank 0 did not come in time ({error})") from error
                time.sleep(_RETRY_S)
        link = _Link(connection, 0)
        self._links.append(link)
        link.send({"rank": self.rank, "ranks": self.num_ranks})
        # Rank 0 knows who is missing, so it has the first word when the time is up.
        self._check(link.receive(deadline + _GRACE_S))

    def _check(self, message: dict[str, Any]) -> dict[str, Any]:
        if "failed" in message:
            raise RankError(message["failed"])
        return message

    def _answer(self, link: _Link, name: str, deadline: float) -> Any:
        """What a rank sent in this call.

        Rank 0 does not wait in `share_fd`, so another rank's value may be that of an earlier call.
        """
        message = self._check(link.receive(deadline))
        if name not in message or message["call"] != self._num_calls:
            raise RankError(f"rank {link.rank} makes another call than rank {self.rank}")
        return message[name]

    def _begin_call(self) -> float:
        """Counts a call that begins now; its deadline."""
        if self._failed is not None:
            raise RankError(self._failed)
        self._num_calls += 1
        return time.monotonic() + self._call_s

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks. Values are what JSON can hold.

        Raises:
            RankError: a rank has failed, has ended or did not come in time; every rank raises.
        """
        deadline = self._begin_call()
        try:
            if self.rank != 0:
                self._tell_rank_0({"call": self._num_calls, "value": value})
                return self._answer(self._links[0], "values", deadline)
            values = [value, *(None for _ in self._links)]
            for link in self._ready_links(deadline):
                values[link.rank] = self._answer(link, "value", deadline)
            for link in self._links:
                link.send({"call": self._num_calls, "values": values})
            return values
        except RankError as error:
            self._leave(str(error))
            raise

    def _tell_rank_0(self, message: dict[str, Any]) -> None:
        try:
            self._links[0].send(message)
        except RankError:
            # What rank 0 said before it left is still there to be read.
            self._check(self._links[0].receive(time.monotonic()))
            raise

    def _ready_links(self, deadline: float) -> Any:
        """Links as they have something to read: a rank that failed is heard before slow ones."""
        waiting = {link.connection: link for link in self._links}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = select.select(list(waiting), [], [], left)[0]
            if not ready:
                slow = min(link.rank for link in waiting.values())
                raise RankError(f"rank {slow} did not come in time")
            for connection in ready:
                yield waiting.pop(connection)

    def barrier(self) -> None:
        """Returns after every rank has called it. Raises as `all_gather` does."""
        self.all_gather(None)

    def share_fd(self, fd: int | None) -> int:
        """Rank 0's file descriptor on every rank; elsewhere a duplicate that the caller closes.

        Raises:
            RankError: as in `all_gather`.
        """
        deadline = self._begin_call()
        try:
            if self.rank == 0:
                if fd is None:
                    raise ProtocolError("rank 0 has no file descriptor to share")
                for link in self._links:
                    link.send({"call": self._num_calls, "fd": True})
                    link.send_fd(fd)
                return fd
            self._answer(self._links[0], "fd", deadline)
            return self._links[0].receive_fd(deadline)
        except RankError as error:
            self._leave(str(error))
            raise

    def why_ended(self) -> str | None:
        """What a rank said that has left the group, or that its process has ended; None if no rank
        has.

        Rank 0 sees all ranks, the others see rank 0, and each sees itself. Not during another call.
        """
        if self._failed is not None:
            return self._failed
        return next((link.last_words() for link in self._links if link.has_ended()), None)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the other ranks what its body raises, and leaves; otherwise the group goes on."""
        try:
            yield
        except BaseException as error:
            self.fail(str(error))
            raise

    def fail(self, reason: str) -> None:
        """Tells the other ranks why this one stops, and leaves. Later calls raise `RankError`."""
        self._leave(f"rank {self.rank}: {reason}")

    def _leave(self, reason: str) -> None:
        if self._failed is None:
            self._failed = reason
            for link in self._links:
                # A rank that is gone does not keep the others from being told.
                with contextlib.suppress(RankError):
                    link.send({"failed": reason})
        self.close()

    def close(self) -> None:
        """Leaves the group. May be called again."""
        if self._failed is None:
            self._failed = "this rank has left the group"
        for link in self._links:
            link.connection.close()
        self._links.clear()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(str(error))
        self.close()
