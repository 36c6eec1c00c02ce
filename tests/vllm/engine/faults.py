# SPDX-License-Identifier: Apache-2.0
"""Owns the planted faults: a check that does not find each of them is worth nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.launch import BLOCK

if TYPE_CHECKING:
    from engine.launch import Engine
    from engine.probe import Batch


class FaultAccess(Protocol):
    """What a worker side offers to plant faults; layers and groups count in the model's order."""

    def host_row_bytes(self, layer: int, host_row: int) -> torch.Tensor:
        """`[row_bytes]` uint8, the row itself in pinned memory."""

    def skip_next_mirror(self) -> None:
        """The coming `finish_forward` writes no row to the host pool."""

    def row_map(self, group: int) -> torch.Tensor:
        """`[state rows, hot rows]` int32 on the device: the host row that each hot slot holds."""


class UpstreamAccess:
    """The same over vLLM's objects."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def host_row_bytes(self, layer: int, host_row: int) -> torch.Tensor:
        """See `FaultAccess`."""
        return self._engine.layers[layer].hisparse_cache.runtime.host_cache[host_row]

    def skip_next_mirror(self) -> None:
        """See `FaultAccess`."""
        worker = self._engine.worker
        finish = worker.finish_forward

        def finish_forward() -> None:
            del worker.finish_forward
            worker._enqueue_row_dma = lambda *_, **__: None
            finish()
            del worker._enqueue_row_dma

        worker.finish_forward = finish_forward

    def row_map(self, group: int) -> torch.Tensor:
        """See `FaultAccess`."""
        return self._engine.groups[group].hisparse_group.device_global_indices


class NativeAccess(UpstreamAccess):
    """The same over hotpage's worker, which keeps row maps where vLLM has them."""

    def host_row_bytes(self, layer: int, host_row: int) -> torch.Tensor:
        """See `FaultAccess`; the pool itself and not vLLM's view of it."""
        name = self._engine.layers[layer].layer_name
        rows = self._engine.worker.host_pool.layer_rows()[name]
        return rows[host_row // BLOCK, host_row % BLOCK]

    def skip_next_mirror(self) -> None:
        """See `FaultAccess`. The mask is told that the rows have landed: a mirror that only does
        not run is found by the mask, and the pages are copied whole."""
        mirrors = self._engine.worker._mirrors

        def launch(which: int, num_tokens: int) -> None:
            del mirrors._launch
            host = self._engine.worker.caches.slots.host_row[:num_tokens]
            landed = torch.ones_like(host) << (host % BLOCK)
            mirrors.masks[which].words.view(-1).scatter_add_(0, host // BLOCK, landed)

        mirrors._launch = launch

    def drop_next_mirror(self) -> None:
        """The coming mirror does not run, and nothing says otherwise."""
        mirrors = self._engine.worker._mirrors
        original = mirrors._launch

        def launch(which: int, num_tokens: int) -> None:
            # The drafter's rows of the step before may still have to go.
            if which:
                original(which, num_tokens)
            else:
                del mirrors._launch

        mirrors._launch = launch


def access_to(engine: Engine) -> FaultAccess:
    """How to plant faults in this engine."""
    return NativeAccess(engine) if engine.spec.engine == "native" else UpstreamAccess(engine)


@dataclass
class _Selected:
    """A selected row of a host-only page."""

    batch_row: int
    state_row: int
    position: int
    host_row: int
    slot: int
    """Hot slot that holds it, or -1."""


class _AtResolve:
    """A fault that is planted between the indexer's choice and its resolution.

    Where graphs run nobody can look in between: there it is planted before the forward pass in all
    rows of a request that the step could meet.
    """

    in_hot_region: bool

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._access = access_to(engine)
        self.planted: str | None = None

    def before_resolve(self, group: int, logical: torch.Tensor, batch: Batch) -> None:
        """Plants the fault in the first step in which it would be met."""
        if self.planted is not None or group not in self._groups() or self._engine.spec.graphs:
            return
        found = self._find(group, logical, batch)
        if found is None:
            return
        # Nothing that runs may still read what is changed, nothing to come may miss it.
        torch.cuda.synchronize()
        self._plant(group, found)
        torch.cuda.synchronize()
        name = batch.names[found.batch_row]
        self.planted = f"{name} position {found.position} host row {found.host_row} group {group}"

    def before_forward(self, batch: Batch) -> None:
        """Plants the fault where graphs run."""
        if self.planted is not None or not self._engine.spec.graphs:
            return
        for group in self._groups():
            for request in range(batch.num_decoding):
                rows = self._host_only_rows(group, request, batch)
                if not rows.numel():
                    continue
                torch.cuda.synchronize()
                planted = self._plant_everywhere(group, int(batch.state_rows[request]), rows)
                torch.cuda.synchronize()
                if planted:
                    name = batch.names[request]
                    self.planted = f"{name} from {batch.starts[request]} {planted} rows"
                    return

    def _host_only_rows(self, group: int, request: int, batch: Batch) -> torch.Tensor:
        """Host rows of the request's pages without a GPU block, `[rows]` int64."""
        handle = self._engine.layers[self._layers_of(group)[0]].hisparse_cache
        pages = batch.starts[request] // BLOCK
        blocks = handle.block_table[int(batch.state_rows[request]), :pages]
        host = handle.source_block_table[request, :pages][blocks == 0].long()
        offset = torch.arange(BLOCK, device=host.device)
        return (host.unsqueeze(1) * BLOCK + offset).reshape(-1)

    def undo(self) -> None:
        """Takes back what a later run could meet."""

    def _groups(self) -> list[int]:
        # A shared result if the model has one: a follower's copy is its own.
        sizes = [group.num_layers for group in self._engine.groups]
        return [at for at, size in enumerate(sizes) if size == max(sizes)]

    def _plant(self, group: int, found: _Selected) -> None:
        raise NotImplementedError

    def _plant_everywhere(self, group: int, state_row: int, rows: torch.Tensor) -> int:
        """Plants the fault in all of these host rows; how many it reached."""
        raise NotImplementedError

    def _find(self, group: int, logical: torch.Tensor, batch: Batch) -> _Selected | None:
        layer = self._layers_of(group)[0]
        handle = self._engine.layers[layer].hisparse_cache
        held = self._access.row_map(group)
        for row, (request, _) in enumerate(batch.decode_rows[: logical.shape[0]]):
            state = int(batch.state_rows[request])
            position = logical[row][logical[row] >= 0].long()
            page = position // BLOCK
            host = handle.source_block_table[request, page].long() * BLOCK + position % BLOCK
            host_only = handle.block_table[state, page] == 0
            in_hot = torch.isin(host, held[state].long())
            wanted = host_only & (in_hot if self.in_hot_region else ~in_hot)
            if not bool(wanted.any()):
                continue
            at = int(wanted.nonzero()[0])
            slots = (held[state] == host[at]).nonzero()
            slot = int(slots[0]) if slots.numel() else -1
            return _Selected(request, state, int(position[at]), int(host[at]), slot)
        return None

    def _layers_of(self, group: int) -> list[int]:
        wanted = self._engine.groups[group]
        layers = self._engine.layers
        return [at for at, layer in enumerate(layers) if layer.impl.index_group is wanted]


class WrongRow(_AtResolve):
    """One bit of one layer's row in the host pool is wrong; the row is a miss of this step."""

    in_hot_region = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._changed: list[torch.Tensor] = []

    def _plant(self, group: int, found: _Selected) -> None:
        self._change(group, [found.host_row])

    def _plant_everywhere(self, group: int, state_row: int, rows: torch.Tensor) -> int:
        held = self._access.row_map(group)[state_row].long()
        missing = rows[~torch.isin(rows, held)].tolist()
        self._change(group, missing)
        return len(missing)

    def _change(self, group: int, host_rows: list[int]) -> None:
        layer = self._layers_of(group)[-1]
        self._changed = [self._access.host_row_bytes(layer, row) for row in host_rows]
        for row in self._changed:
            row[0] ^= 1

    def undo(self) -> None:
        """Turns the bits back."""
        torch.cuda.synchronize()
        # The views were made inside the engine's step, where tensors keep no versions.
        with torch.inference_mode():
            for row in self._changed:
                row[0] ^= 1


class StaleSlot(_AtResolve):
    """Two hot slots hold each other's row; one of them is a hit of this step."""

    in_hot_region = True

    def _plant(self, group: int, found: _Selected) -> None:
        held = self._access.row_map(group)[found.state_row]
        others = ((held >= 0) & (held != found.host_row)).nonzero()
        other = int(others[0])
        mine = held[found.slot].clone()
        held[found.slot] = held[other]
        held[other] = mine

    def _plant_everywhere(self, group: int, state_row: int, rows: torch.Tensor) -> int:
        held = self._access.row_map(group)[state_row]
        slots = torch.isin(held.long(), rows).nonzero().squeeze(1)
        held[slots] = held[slots].roll(1)
        return len(slots) if len(slots) > 1 else 0


class SkippedMirror:
    """The rows of the workload's first step never reach the host pool."""

    def __init__(self, engine: Engine) -> None:
        self._access = access_to(engine)
        self.planted: str | None = None

    def before_resolve(self, group: int, logical: torch.Tensor, batch: Batch) -> None:
        """Does nothing."""

    def before_forward(self, batch: Batch) -> None:
        """Has the first step's mirror dropped."""
        if self.planted is None and batch.names:
            self._access.skip_next_mirror()
            pairs: list[Any] = list(zip(batch.names, batch.starts, batch.counts, strict=True))
            self.planted = f"rows of {pairs}"

    def undo(self) -> None:
        """Nothing of it outlives its requests."""


FAULTS = {"wrong row": WrongRow, "skipped mirror": SkippedMirror, "stale slot": StaleSlot}
