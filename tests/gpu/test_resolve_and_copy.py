# SPDX-License-Identifier: Apache-2.0
"""Owns the proof that resolve_and_copy equals the model, bit for bit, over many steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference import Batch, HotState, resolve_batch  # noqa: E402
from resolve_cases import PLAIN, Odds, Shape, Workload, empty_states  # noqa: E402
from resolve_device import DEVICE, POISON, DeviceResolve, same  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.gpu

SMALL = Shape()
SHAPES = {
    "one row": SMALL,
    "four rows": Shape(rows_per_request=4, hot_rows=256, num_requests=5),
    "ten rows, wide rows": Shape(
        rows_per_request=10, top_k=48, hot_rows=480, row_bytes=1152, num_layers=1
    ),
    "odd k, blocks of 48": Shape(top_k=33, hot_rows=96, block_size=48, num_layers=8),
    "k 1,100": Shape(
        top_k=1100, rows_per_request=2, hot_rows=2304, num_pages=60, block_size=64, row_bytes=656
    ),
    "k 2,048": Shape(
        top_k=2048, hot_rows=4096, num_pages=100, block_size=64, row_bytes=656, num_layers=4
    ),
    "k 2,048 x 4": Shape(
        top_k=2048, rows_per_request=4, hot_rows=10240, num_pages=250, block_size=64, num_layers=1
    ),
    "k 2,048 x 10": Shape(
        num_requests=2, top_k=2048, rows_per_request=10, hot_rows=22528, num_pages=700,
        block_size=64, num_layers=1,
    ),
    "k 4,096 x 8, blocks of 16": Shape(
        num_requests=2, top_k=4096, rows_per_request=8, hot_rows=32768, num_pages=4000, num_layers=1
    ),
}  # fmt: skip


def run_steps(
    device: DeviceResolve, work: Workload, states: list[HotState], steps: int, name: str
) -> None:
    """Steps with state carried over, each compared in full."""
    for step in range(steps):
        batch = work.step()
        device.load(batch)
        device.run()
        expected = resolve_batch(batch, states)
        device.check(expected, states, f"{name}, step {step}")


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_state_and_bytes_equal_the_model_over_many_steps(name: str) -> None:
    shape = SHAPES[name]
    union = shape.top_k * shape.rows_per_request
    steps = 400 if union < 1000 else 25 if union < 10_000 else 6
    for seed in (1, 2):
        work = Workload(shape, seed)
        states = empty_states(shape)
        run_steps(DeviceResolve(shape), work, states, steps, f"{name}, seed {seed}")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("copy", ["group", "leader"])
@pytest.mark.parametrize("max_copy_blocks", [0, 1, 16])
def test_every_layout_and_way_to_copy_moves_the_same_rows(
    interleaved: bool, copy: str, max_copy_blocks: int
) -> None:
    shape = Shape(num_layers=4, row_bytes=656, interleaved=interleaved, rows_per_request=2)
    device = DeviceResolve(shape, copy=copy, max_copy_blocks=max_copy_blocks)
    states = empty_states(shape)
    run_steps(device, Workload(shape, 7), states, 30, "layout")


@pytest.mark.parametrize(
    ("name", "odds"),
    [
        ("all resident", Odds(resident_page=1.0, no_region=1.0)),
        ("every row missed", Odds(0, 0, 0, 0, 0, 0, uneven=False, working_set=0, redraw=2.0)),
        ("every row hit", Odds(0, 0, 0, 0, 0, 0, uneven=False, working_set=0, redraw=0)),
        ("hot region as large as the union", PLAIN),
    ],
)
def test_extreme_mixes_equal_the_model(name: str, odds: Odds) -> None:
    hot_rows = 64 if name.startswith("hot region") else 128
    shape = Shape(hot_rows=hot_rows, num_requests=8)
    states = empty_states(shape)
    run_steps(DeviceResolve(shape), Workload(shape, 3, odds), states, 60, name)


def test_stamps_are_renormalised_at_the_end_of_sixteen_bits() -> None:
    shape = Shape(rows_per_request=2)
    device, work = DeviceResolve(shape), Workload(shape, 5)
    states = empty_states(shape)
    run_steps(device, work, states, 40, "before")
    for gap in (3, 0):
        # The same order with the youngest stamps close to the last epoch.
        stamps = device.state.last_used.cpu().numpy().view(np.uint16).astype(np.int64)
        ages = np.where(stamps > 0, stamps.max() - stamps, 0)
        stamps = np.where(stamps > 0, 65535 - gap - ages, 0)
        as_int16 = torch.from_numpy(stamps.astype(np.uint16).view(np.int16))
        device.state.last_used.copy_(as_int16)
        device.state.epoch.fill_(65535 - gap)
        run_steps(device, work, states, 30, f"gap {gap}")
    used = [int(row) for row in work.state_row]
    assert int(device.state.epoch[used].max()) < 1000


def test_victims_are_taken_by_age_and_then_by_slot_when_every_slot_has_its_own_age() -> None:
    shape = Shape(num_requests=1, top_k=64, hot_rows=128, num_pages=200)
    device = DeviceResolve(shape)
    states = empty_states(shape)
    work = Workload(shape, 11, PLAIN)
    batch = work.step()
    rng = np.random.default_rng(0)
    for step in range(200):
        # Mostly one position a step, so that stamps spread out; then a burst.
        n = 64 if step % 67 == 66 else 1
        batch.logical_topk[:] = -1
        batch.logical_topk[0, :n] = rng.permutation(3200)[:n]
        device.load(batch)
        device.run()
        expected = resolve_batch(batch, states)
        device.check(expected, states, f"ages, step {step}")


def test_order_of_the_top_k_changes_nothing_but_the_order_of_the_output() -> None:
    shape = Shape(top_k=256, hot_rows=512, num_requests=4)
    results = []
    for shuffle in (False, True):
        device, work = DeviceResolve(shape), Workload(shape, 13, PLAIN)
        rng = np.random.default_rng(1)
        for _ in range(20):
            batch = work.step()
            if shuffle:
                batch.logical_topk[:-1] = rng.permuted(batch.logical_topk[:-1], axis=1)
            device.load(batch)
            device.run()
        torch.cuda.synchronize()
        n = int(device.copies.count.max())
        results.append(
            (device.state.row_map.cpu(), device.state.last_used.cpu(),
             device.copies.host_row.cpu()[:, :n], device.copies.hot_row.cpu()[:, :n],
             device.gpu_pool.shape)
        )  # fmt: skip
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        assert torch.equal(a, b)


def test_a_captured_graph_replays_with_other_inputs() -> None:
    shape = Shape(rows_per_request=4, hot_rows=256, num_requests=5, num_layers=4, row_bytes=656)
    device, work = DeviceResolve(shape, copy="leader"), Workload(shape, 17)
    states = empty_states(shape)
    run_steps(device, work, states, 3, "eager")
    saved = [t.clone() for t in (device.state.row_map, device.state.last_used, device.state.epoch)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.run()
    for tensor, before in zip(
        (device.state.row_map, device.state.last_used, device.state.epoch), saved, strict=True
    ):
        assert torch.equal(tensor, before), "capturing ran the kernel"
    for step in range(60):
        batch: Batch = work.step()
        device.load(batch)
        graph.replay()
        expected = resolve_batch(batch, states)
        device.check(expected, states, f"replay {step}")


@pytest.mark.parametrize("last", ["copy", "kernel"])
def test_a_captured_resolve_waits_for_what_other_streams_write(last: str) -> None:
    """The launch may start before its inputs are there; nothing is read before they are."""
    shape = Shape(rows_per_request=2, num_requests=5, num_layers=4, row_bytes=656)
    device, work = DeviceResolve(shape, copy="leader"), Workload(shape, 37)
    states = empty_states(shape)
    run_steps(device, work, states, 3, "eager")
    topk, seq_len = device.inputs.logical_topk, device.inputs.seq_len
    later_topk, later_len = torch.empty_like(topk), torch.empty_like(seq_len)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000)
            if last == "copy":
                seq_len.copy_(later_len)
            else:
                torch.add(later_len, 0, out=seq_len)
        torch.add(later_topk, 0, out=topk)
        main.wait_stream(side)
        device.run()
    for step in range(20):
        batch = work.step()
        device.load(batch)
        later_topk.copy_(topk)
        later_len.copy_(seq_len)
        topk.fill_(-1)
        seq_len.zero_()
        graph.replay()
        device.check(resolve_batch(batch, states), states, f"{last}, replay {step}")


def test_a_smaller_batch_from_other_buffers_leaves_later_outputs_alone() -> None:
    rows_each = 2
    shape = Shape(rows_per_request=rows_each, num_requests=5, num_layers=4, row_bytes=656)
    device, work = DeviceResolve(shape), Workload(shape, 31, Odds(uneven=False))
    states = empty_states(shape)
    for step, requests in enumerate((5, 2, 1, 4, 5, 3) * 5):
        whole, rows = work.step(), requests * rows_each
        batch = replace(
            whole,
            logical_topk=whole.logical_topk[:rows],
            row_request=whole.row_request[:rows],
            num_valid_rows=min(whole.num_valid_rows, rows),
            seq_len=whole.seq_len[:rows],
            state_row=whole.state_row[:requests],
            source_block_table=whole.source_block_table[:requests],
            hot_block_table=whole.hot_block_table[:requests],
        )
        device.load(whole)
        # A buffer with gaps between rows; those that were bound hold nonsense now.
        wide = torch.full((rows, shape.top_k + 5), 3, dtype=torch.int32, device=DEVICE)
        topk = wide[:, : shape.top_k]
        topk.copy_(device.inputs.logical_topk[:rows])
        row_request = device.inputs.row_request[: rows + 1].clone()
        num_valid = torch.tensor([batch.num_valid_rows], dtype=torch.int32, device=DEVICE)
        device.inputs.logical_topk.fill_(1)
        device.inputs.row_request.fill_(0)
        device.inputs.num_valid_rows.fill_(1)
        device.resolve.set_batch(topk, row_request, num_valid, requests)
        device.run()
        expected = resolve_batch(batch, states)
        torch.cuda.synchronize()
        where = f"{requests} requests, step {step}"
        outputs = device.physical[:, :-1].cpu().numpy()
        same(outputs[:rows], expected.physical_topk, f"{where}: physical_topk (row, k)")
        assert (outputs[rows:] == POISON).all(), f"{where}: rows behind the batch"
        counts = device.counts.cpu().numpy()
        same(counts[:rows], expected.valid_counts, f"{where}: valid_counts (row)")
        assert (counts[rows:] == POISON).all(), f"{where}: counts behind the batch"
        device.check_copies(expected, where)
        for tensor in (device.copies.count, device.copies.host_row, device.copies.hot_row):
            assert bool((tensor[requests:] == POISON).all()), f"{where}: lists behind the batch"
        row_map = np.stack([state.row_map for state in states])
        same(device.state.row_map.cpu().numpy(), row_map, f"{where}: row_map (state row, slot)")


@pytest.mark.parametrize(
    ("rows", "width", "entries", "requests", "sentence"),
    [
        (12, 64, 12, 5, "rows of the batch is 12, expected 1 to 11"),
        (4, 63, 4, 2, "logical_topk has shape"),
        (4, 64, 3, 2, "entries of row_request is 3"),
        (4, 64, 4, 6, "num_requests is 6, expected 1 to 5"),
        (4, 64, 4, 0, "num_requests is 0, expected 1 to 5"),
    ],
)
def test_a_batch_that_does_not_fit_what_was_bound_is_refused(
    rows: int, width: int, entries: int, requests: int, sentence: str
) -> None:
    shape = Shape(rows_per_request=2, num_requests=5)
    device = DeviceResolve(shape, with_bytes=False, copy="none")
    topk = torch.zeros((rows, width), dtype=torch.int32, device=DEVICE)
    row_request = torch.zeros(entries, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigError, match=sentence):
        device.resolve.set_batch(topk, row_request, device.inputs.num_valid_rows, requests)


def test_two_index_groups_run_on_two_streams_at_the_same_time() -> None:
    shape = Shape(top_k=512, hot_rows=1024, num_requests=16, num_pages=100, row_bytes=656)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    devices = [DeviceResolve(shape), DeviceResolve(shape)]
    works = [Workload(shape, 19), Workload(shape, 23)]
    state_sets = [empty_states(shape) for _ in works]
    for step in range(30):
        batches = [work.step() for work in works]
        for device, batch in zip(devices, batches, strict=True):
            device.load(batch)
        torch.cuda.synchronize()
        for device, stream in zip(devices, streams, strict=True):
            with torch.cuda.stream(stream):
                device.run()
        for device, batch, states in zip(devices, batches, state_sets, strict=True):
            expected = resolve_batch(batch, states)
            device.check(expected, states, f"streams, step {step}")


def test_the_same_input_on_the_same_state_gives_the_same_bits() -> None:
    shape = Shape(rows_per_request=4, hot_rows=256, num_requests=5)
    work = Workload(shape, 29)
    batches = [work.step() for _ in range(25)]
    runs = []
    for _ in range(2):
        device = DeviceResolve(shape, with_bytes=False, copy="none")
        for batch in batches:
            device.load(batch)
            device.run()
        torch.cuda.synchronize()
        tensors = (device.physical, device.counts, device.state.row_map, device.state.last_used)
        runs.append([t.cpu() for t in tensors])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_rows_beyond_two_to_the_31_bytes_are_addressed() -> None:
    """A pool of 5 GiB: rows on both sides of byte 2^31 and 2^32 arrive whole."""
    from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy

    row_bytes, num_rows = 656, 8_400_064
    host = torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)
    wanted = [1, 2**31 // 656, 2**31 // 656 + 1, 2**32 // 656, 2**32 // 656 + 1, num_rows - 1]
    for i, row in enumerate(wanted):
        host[row] = i + 1
    gpu = torch.zeros((num_rows, row_bytes), dtype=torch.uint8, device=DEVICE)
    copies = CopyList.allocate(1, 16, DEVICE)
    rows = torch.tensor(wanted, dtype=torch.int32, device=DEVICE)
    copies.host_row[0, : len(wanted)] = rows
    copies.hot_row[0, : len(wanted)] = rows
    copies.count.fill_(len(wanted))
    layers = LayerRows([host], [gpu.view(-1, 64, row_bytes)], 64)
    ReplayCopy(copies, layers)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(gpu[rows.long()].cpu(), host[wanted])
    assert int((gpu[:, 0] != 0).sum()) == len(wanted)
