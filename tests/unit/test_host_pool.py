# SPDX-License-Identifier: Apache-2.0
"""Owns the life of the host pool: cuts, refusals, roll-back and end, by a stand-in driver."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import mmap
import re
import sys
from pathlib import Path

import pytest

from hotpage.errors import CapacityError, ConfigError
from hotpage.memory import HostPool, PoolLayout, _host
from hotpage.memory.pool import check_ram

LAYOUTS = {
    "GLM-like, interleaved": PoolLayout((1, 1, *([4] * 19), 1), 64, 656, 8),
    "GLM-like, layer-major": PoolLayout((1, 1, *([4] * 19), 1), 64, 656, 8, False),
    "bf16 rows": PoolLayout((4, 4), 64, 1152, 64),
    "odd number of blocks": PoolLayout((1, 4, 3), 64, 656, 37),
    "small blocks": PoolLayout((2, 1), 16, 656, 301),
    "no place to cut": PoolLayout((1,), 1, 16, 255),
}


class StandIn:
    """A driver that keeps a list; `fail_at` refuses one registration, `gone` every call after."""

    def __init__(self, fail_at: int | None = None, bus_id: str | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.fail_at, self.bus_id = fail_at, bus_id
        self.unregister_status = 0

    def register(self, address: int, num_bytes: int) -> int:
        self.calls.append(("register", address))
        if self.fail_at == sum(call == "register" for call, _ in self.calls) - 1:
            return 2
        assert not any(a < address + num_bytes and address < a + n for a, n in self.ranges.items())
        self.ranges[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        if self.unregister_status == 0:
            del self.ranges[address]
        return self.unregister_status

    def status_text(self, status: int) -> str:
        return f"status {status}"

    def pci_bus_id(self) -> str | None:
        return self.bus_id


def _reference():
    """The numpy reference of the data plane, whose views say where rows lie."""
    pytest.importorskip("numpy")
    path = Path(__file__).resolve().parents[1] / "gpu" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_lie_where_the_reference_has_them(name: str) -> None:
    layout = LAYOUTS[name]
    pools = _reference().Pools(
        [list(layout.index_groups)],
        layout.block_size,
        layout.row_bytes,
        2,
        layout.num_host_blocks,
        "row_interleaved" if layout.row_interleaved else "layer_major",
    )
    assert layout.num_bytes == pools.host.size
    for layer, view in enumerate(pools.host_layers):
        place = layout.place(layer)
        offset = view.ctypes.data - pools.host.ctypes.data
        assert place.offset == offset, layer
        if layout.block_size > 1:
            assert (place.row_stride, layout.block_size * place.row_stride) == view.strides[1::-1]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20, 5_000_000, 1 << 40])
def test_no_chunk_ends_inside_a_host_block_or_a_page_of_memory(name: str, chunk_bytes: int) -> None:
    layout = LAYOUTS[name]
    chunks = layout.chunks(chunk_bytes)
    assert chunks[0][0] == 0
    assert chunks[-1][1] == layout.num_bytes
    assert all(end == after for (_, end), (after, _) in itertools.pairwise(chunks))
    edges = {end for _, end in chunks[:-1]}
    assert all(edge % 4096 == 0 for edge in edges)
    # The bytes of one block in one region: rows of all its layers, one after the other.
    for layer in range(layout.num_layers):
        place = layout.place(layer)
        for block in range(layout.num_host_blocks):
            first = place.offset + block * layout.block_size * place.row_stride
            last = first + (layout.block_size - 1) * place.row_stride + layout.row_bytes
            assert not any(first < edge < last for edge in edges), (layer, block)
    if layout.num_bytes > 3 << 20 and chunk_bytes == 1 << 20:
        assert len(chunks) > 1, "a pool this large has places to cut"


def test_a_chunk_is_no_larger_than_asked_for_where_there_is_a_place_to_cut() -> None:
    layout = PoolLayout((4, 4), 64, 656, 64)
    sizes = [end - start for start, end in layout.chunks(1 << 20)]
    assert max(sizes) <= 1 << 20
    assert sum(sizes) == layout.num_bytes


def test_a_pool_is_mapped_touched_and_registered_chunk_by_chunk_and_given_back() -> None:
    driver = StandIn()
    layout = LAYOUTS["bf16 rows"]
    pool = HostPool(layout, driver=driver, chunk_bytes=1 << 20)
    chunks = layout.chunks(1 << 20)
    assert len(chunks) > 3
    assert driver.ranges == {pool.address + a: b - a for a, b in chunks}
    assert pool.is_open
    pool.close()
    assert driver.ranges == {}
    assert not pool.is_open
    pool.close()
    assert len([call for call, _ in driver.calls if call == "unregister"]) == len(chunks)


def test_a_process_that_forks_keeps_its_pool_to_itself() -> None:
    """Pages that a device may write are copied for the child at once, all of them."""
    with HostPool(PoolLayout((1, 1), 64, 656, 300), driver=StandIn(), num_threads=1) as pool:
        flags, inside = None, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= pool.address < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line.split()[1:]
    assert flags is not None
    assert "dc" in flags, "a child gets the mapping"


def test_when_a_chunk_cannot_be_pinned_those_before_it_are_given_back() -> None:
    driver = StandIn(fail_at=2)
    with pytest.raises(CapacityError, match=r"chunk 3 of \d+ .*status 2.*host_pool_gib"):
        HostPool(LAYOUTS["bf16 rows"], driver=driver, chunk_bytes=1 << 20)
    assert driver.ranges == {}
    registered = [a for call, a in driver.calls if call == "register"][:2]
    undone = [a for call, a in driver.calls if call == "unregister"]
    assert undone == registered[::-1]


def test_memory_that_runs_out_during_the_first_touch_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(address: int, num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_host, "_touch_range", fail)
    driver = StandIn()
    with pytest.raises(CapacityError, match="Cannot allocate memory"):
        HostPool(LAYOUTS["bf16 rows"], driver=driver)
    assert driver.calls == []


def test_a_dead_context_does_not_stop_the_pool_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = StandIn()
    pool = HostPool(LAYOUTS["bf16 rows"], driver=driver, chunk_bytes=1 << 20)
    driver.unregister_status = 719
    pool.close()
    assert not pool.is_open
    # One question is enough: the context holds none of the other chunks either.
    assert [call for call, _ in driver.calls].count("unregister") == 1
    assert "context is gone" in caplog.text


def test_a_chunk_that_cannot_be_unpinned_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = StandIn()
    pool = HostPool(LAYOUTS["bf16 rows"], driver=driver, chunk_bytes=1 << 20)
    driver.unregister_status = 1
    pool.close()
    assert [call for call, _ in driver.calls].count("unregister") == len(driver.ranges)
    assert "stays pinned" in caplog.text


def test_views_may_outlive_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(LAYOUTS["small blocks"], driver=StandIn())
    view = memoryview(pool._buffer)
    with caplog.at_level(logging.INFO, "hotpage.memory"):
        pool.close()
    assert "outlive" in caplog.text
    assert view[0] == 0


def test_tensors_may_outlive_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """torch holds no export of a buffer; memory unmapped under a tensor ends the process."""
    pytest.importorskip("torch")
    pool = HostPool(LAYOUTS["small blocks"], driver=StandIn())
    rows = pool.layer_rows(1)
    rows.fill_(3)
    with caplog.at_level(logging.INFO, "hotpage.memory"):
        pool.close()
    assert "outlive" in caplog.text
    assert bool((rows == 3).all())
    del rows
    caplog.clear()
    again = HostPool(LAYOUTS["small blocks"], driver=StandIn())
    again.layer_rows(0)
    mapping = again._mapping
    again.close()
    assert mapping is not None
    assert mapping.closed, "a tensor that is gone keeps nothing"


def test_a_buffer_of_the_caller_is_registered_and_left_open() -> None:
    layout = LAYOUTS["small blocks"]
    driver = StandIn()
    with mmap.mmap(-1, layout.num_bytes + 4096) as shared:
        shared[:4] = b"kept"
        with HostPool(layout, buffer=shared, driver=driver, ram_bytes=1) as pool:
            assert sum(driver.ranges.values()) == layout.num_bytes
            assert pool.numa_node is None
        assert driver.ranges == {}
        assert shared[:4] == b"kept"
    for bad in (b"read-only", bytearray(layout.num_bytes - 1)):
        with pytest.raises(ConfigError, match="buffer"):
            HostPool(layout, buffer=bad, driver=driver)


def test_a_pool_of_more_than_95_percent_of_the_ram_is_refused_before_it_is_mapped() -> None:
    layout = LAYOUTS["bf16 rows"]
    with pytest.raises(CapacityError, match="95% of the RAM"):
        HostPool(layout, driver=StandIn(), ram_bytes=layout.num_bytes)
    check_ram(95, 100)
    with pytest.raises(CapacityError):
        check_ram(96, 100)
    check_ram(1 << 60, None)


def test_ram_is_the_machine_or_the_lower_limit_of_the_cgroup(tmp_path: Path) -> None:
    assert _host.total_ram_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemTotal:   2048 kB\n")
    assert _host.total_ram_bytes(tmp_path) == 2 << 20
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    for text, expected in (("max\n", 2 << 20), (f"{1 << 20}\n", 1 << 20), (f"{1 << 62}", 2 << 20)):
        (cgroup / "memory.max").write_text(text)
        assert _host.total_ram_bytes(tmp_path) == expected


def test_the_node_of_the_gpu_is_used_where_the_kernel_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    assert _host.numa_node_of(None, tmp_path) is None
    assert _host.numa_node_of("0000:1b:00.0", tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert _host.numa_node_of("0000:1b:00.0", tmp_path) is None
    (device / "numa_node").write_text("1\n")
    assert _host.numa_node_of("0000:1b:00.0", tmp_path) == 1

    asked: list[int] = []
    monkeypatch.setattr(_host, "numa_node_of", lambda bus_id: 1 if bus_id == "bus" else None)
    monkeypatch.setattr(_host, "prefer_node", lambda *range_and_node: not asked.append(1))
    with HostPool(LAYOUTS["small blocks"], driver=StandIn(bus_id="bus")) as pool:
        assert (pool.numa_node, asked) == (1, [1])
    with HostPool(LAYOUTS["small blocks"], driver=StandIn()) as pool:
        assert (pool.numa_node, asked) == (None, [1])


def test_a_preference_for_node_0_is_accepted_or_refused_but_never_breaks_the_memory() -> None:
    with mmap.mmap(-1, 1 << 20) as memory:
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert _host.prefer_node(address, 1 << 20, 0) in (True, False)
        _host.touch(address, 1 << 20, 2)
        assert memory[-1] == 0


def test_rows_of_a_layer_are_a_view_of_the_pool() -> None:
    torch = pytest.importorskip("torch")
    layout = PoolLayout((1, 2), 16, 32, 4)
    with HostPool(layout, driver=StandIn()) as pool:
        rows = pool.layer_rows(2)
        rows[3, 5] = 7
        flat = pool.bytes_tensor()
        place = layout.place(2)
        at = place.offset + (3 * 16 + 5) * place.row_stride
        assert flat[at : at + 32].tolist() == [7] * 32
        assert int((flat != 0).sum()) == 32
        assert rows.dtype == torch.uint8
        with pytest.raises(ConfigError, match="layer is 3"):
            pool.layer_rows(3)
        del rows, flat
    with pytest.raises(ConfigError, match="closed"):
        pool.bytes_tensor()
