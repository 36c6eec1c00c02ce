// SPDX-License-Identifier: Apache-2.0
//! Owns the life-cycle rules as checks over the Coordinator's tables, the pools and the workers.
//! Each check is written once and run by every test that drives a [`super::World`].

use std::collections::BTreeMap;

use super::toy::{CountedPool, ToyPool, ToyWorker};
use super::{Check, ensure, signed};
use crate::Coordinator;
use crate::config::{ReleasePoint, TAIL_PAGES};
use crate::coordinator::Inspection;
use crate::ids::{BlockId, PageIndex, RequestId};
use crate::page::PageState;
use crate::request::{Phase, RequestState};
use crate::residency::ResidenceId;
use crate::step::{PoolLevels, StepPlan, TransferKind};

/// Everything that must hold after every event. `tenants` are GPU blocks that somebody else
/// holds.
///
/// # Errors
/// The first rule that is broken.
pub fn check(
    c: &Coordinator,
    gpu: &impl CountedPool,
    host: &impl CountedPool,
    tenants: &[i32],
) -> Check {
    gpu.check()?;
    host.check()?;
    let view = c.inspect();
    gpu_blocks_conserve(&view, &gpu.holds(), tenants)?;
    host_blocks_conserve(&view, &host.holds())?;
    only_copies_are_held(&view)?;
    transfers_hold_until_the_release_point(c, &view)?;
    durable_prefixes_are_prefixes(&view)?;
    host_reads_have_a_hot_region(&view)?;
    queues_and_counts_agree(c, &view)
}

/// Rules 1 and 8: the holds on each GPU block are those of live requests' pages, hot regions,
/// transfers, releases that wait for a plan, and tenants.
fn gpu_blocks_conserve(view: &Inspection<'_>, gpu: &[u32], tenants: &[i32]) -> Check {
    let mut holds = vec![0_u32; gpu.len()];
    let mut add = |blocks: &[i32]| {
        for &block in blocks {
            holds[block.unsigned_abs() as usize] += 1;
        }
    };
    for (_, state) in &view.requests {
        add(state.hot.blocks());
        for (page, &id) in state.states().iter().zip(&state.residences) {
            if page.holds_blocks() || *page == PageState::Importing {
                add(view.residences.blocks(id));
            }
        }
    }
    for (_, transfer) in view.transfers.iter() {
        add(transfer.gpu_lease.as_ref().map_or(&[], |lease| lease.blocks()));
    }
    let kept = holds.clone();
    let mut add = |blocks: &[i32]| {
        for &block in blocks {
            holds[block.unsigned_abs() as usize] += 1;
        }
    };
    add(&view.releasing_gpu);
    let released = kept.iter().zip(&holds).filter(|(kept, all)| **kept == 0 && **all > 0).count();
    ensure(1, view.released_gpu == released as i64, || {
        format!(
            "{} blocks counted as free with the next plan, expected {released}",
            view.released_gpu
        )
    })?;
    let mut add = |blocks: &[i32]| {
        for &block in blocks {
            holds[block.unsigned_abs() as usize] += 1;
        }
    };
    add(tenants);
    equal_holds(1, "GPU", &holds, gpu)
}

/// Rules 1 and 8 for the host pool, and the Coordinator's own count of users.
fn host_blocks_conserve(view: &Inspection<'_>, host: &[u32]) -> Check {
    let mut holds = vec![0_u32; host.len()];
    let mut add = |blocks: &[i32]| {
        for &block in blocks.iter().filter(|&&block| block != 0) {
            holds[block.unsigned_abs() as usize] += 1;
        }
    };
    for (_, state) in &view.requests {
        add(&state.host_blocks);
        state.beyond_gap.iter().for_each(|(_, lease)| add(lease.blocks()));
    }
    for (_, transfer) in view.transfers.iter() {
        add(transfer.host_lease.as_ref().map_or(&[], |lease| lease.blocks()));
    }
    add(&view.copy_sources);
    equal_holds(1, "host users of", &holds, view.host_users)?;
    let mut add = |blocks: &[i32]| {
        for &block in blocks {
            holds[block.unsigned_abs() as usize] += 1;
        }
    };
    add(&view.releasing_host);
    equal_holds(1, "host", &holds, host)
}

fn equal_holds(rule: u8, what: &str, expected: &[u32], got: &[u32]) -> Check {
    let n = expected.len().max(got.len());
    let at = |list: &[u32], block: usize| list.get(block).copied().unwrap_or(0);
    for block in 0..n {
        let (expected, got) = (at(expected, block), at(got, block));
        ensure(rule, expected == got, || {
            format!("{what} block {block} has {got} holds, expected {expected}")
        })?;
    }
    Ok(())
}

/// Rule 2: residences count their holders and know their readers, so that no block of a page
/// that somebody holds can be taken for unpinned.
fn only_copies_are_held(view: &Inspection<'_>) -> Check {
    let mut holders: BTreeMap<ResidenceId, u32> = BTreeMap::new();
    let mut readers: BTreeMap<ResidenceId, Vec<RequestId>> = BTreeMap::new();
    for (id, state) in view.requests.iter().filter(|(_, s)| s.phase == Phase::Live) {
        for ((at, page), &residence) in state.states().iter().enumerate().zip(&state.residences) {
            let placed = !residence.is_none();
            ensure(2, page.is_resident() == placed || *page == PageState::Importing, || {
                format!("request {id} page {at} is {page:?}, has GPU blocks: {placed}")
            })?;
            if placed {
                readers.entry(residence).or_default().push(*id);
                if page.holds_blocks() || *page == PageState::Importing {
                    *holders.entry(residence).or_default() += 1;
                }
            }
        }
    }
    for (_, transfer) in view.transfers.iter().filter(|(_, t)| t.gpu_lease.is_some()) {
        *holders.entry(transfer.residence).or_default() += 1;
    }
    for (id, residence) in view.residences.iter() {
        let expected = holders.get(&id).copied().unwrap_or(0);
        ensure(2, residence.holders == expected, || {
            format!("{id:?} has {} holders, expected {expected}", residence.holders)
        })?;
        let mut got: Vec<RequestId> = residence.readers.to_vec();
        got.sort_unstable();
        let expected = readers.remove(&id).unwrap_or_default();
        ensure(2, got == expected, || format!("{id:?} read by {got:?}, expected {expected:?}"))?;
        for &block in view.residences.blocks(id) {
            let found = view.residences.of_block(BlockId(block));
            ensure(2, found == id, || format!("block {block} leads to {found:?}, not {id:?}"))?;
        }
    }
    ensure(2, readers.is_empty(), || format!("pages name ended residences: {readers:?}"))
}

/// Rules 2 and 4: a spill gives up its GPU blocks when every writer has enqueued it, and only
/// where the release point says so.
fn transfers_hold_until_the_release_point(c: &Coordinator, view: &Inspection<'_>) -> Check {
    for (id, transfer) in view.transfers.iter() {
        let released = transfer.gpu_lease.is_none() && transfer.kind != TransferKind::HostCopy;
        let may = c.config().release_point == ReleasePoint::Enqueued
            && transfer.enqueued == transfer.required;
        ensure(4, !released || may, || format!("transfer {id} gave up its blocks early"))?;
        ensure(4, transfer.host_lease.is_some(), || format!("transfer {id} has no host lease"))?;
        ensure(4, transfer.completed <= transfer.enqueued, || format!("transfer {id} counts"))?;
    }
    Ok(())
}

/// Rule 3: what counts as durable is a prefix of durable pages, and no page that only the GPU
/// holds is in it.
fn durable_prefixes_are_prefixes(view: &Inspection<'_>) -> Check {
    for (id, state) in &view.requests {
        let n = state.num_pages();
        let prefix = (0..n).take_while(|&page| state.is_durable(PageIndex(page))).count();
        ensure(3, prefix == state.durable_prefix as usize, || {
            format!("request {id} counts {} durable pages, has {prefix}", state.durable_prefix)
        })?;
        ensure(3, state.published <= state.durable_prefix, || {
            format!("request {id} published {} of {prefix}", state.published)
        })?;
        if state.phase != Phase::Live {
            continue;
        }
        for (at, page) in (0_u32..).zip(state.states()) {
            let durable = state.is_durable(PageIndex(at));
            use PageState as S;
            let legal = match page {
                S::Dirty | S::Spilling | S::Enqueued | S::Importing => !durable,
                S::Clean => durable,
                S::Unpinned | S::HostOnly => true,
            };
            ensure(3, legal, || format!("request {id} page {at}: {page:?}, durable {durable}"))?;
        }
    }
    Ok(())
}

/// Rule 5: a request that has been scheduled and reads from the host holds a hot region.
fn host_reads_have_a_hot_region(view: &Inspection<'_>) -> Check {
    for (id, state) in view.requests.iter().filter(|(_, s)| s.phase == Phase::Live) {
        let reads = state.count(PageState::HostOnly) + state.count(PageState::Unpinned) > 0;
        ensure(5, !reads || !state.announced || state.hot.is_held(), || {
            format!("request {id} reads from the host without a hot region")
        })?;
    }
    Ok(())
}

/// Rules 8 and 10: the counts that stand in for scans agree with the scans.
fn queues_and_counts_agree(c: &Coordinator, view: &Inspection<'_>) -> Check {
    let mut live = Vec::new();
    for (id, state) in &view.requests {
        let transfers = view.transfers.iter().filter(|(_, t)| t.request == *id).count();
        ensure(8, transfers == state.num_transfers as usize, || {
            format!("request {id} counts {} transfers, has {transfers}", state.num_transfers)
        })?;
        let queued = view.publishing.iter().filter(|r| *r == id).count();
        ensure(8, queued > 0 || !state.publish_queued, || {
            format!("request {id} is marked as queued for publication and is not")
        })?;
        check_page_counts(*id, state)?;
        if state.phase == Phase::Live {
            live.push(*id);
        }
    }
    let (_, residences) = view.num_slots;
    let blocks = c.config().gpu_blocks as usize;
    ensure(10, residences <= blocks, || format!("{residences} entries for {blocks} blocks"))?;
    let mut listed = view.lru.clone();
    listed.sort_unstable();
    ensure(8, listed == live, || format!("recency lists {listed:?}, live are {live:?}"))?;
    ensure(8, c.num_live() as usize == live.len(), || format!("{} live requests", c.num_live()))?;
    let leases = view.transfers.iter().filter(|(_, t)| t.gpu_lease.is_some()).count();
    let pending = !view.releasing_gpu.is_empty() || leases > 0;
    let idle = PoolLevels::default();
    ensure(10, c.has_pending_reclamation(idle) == pending, || {
        format!("pending reclamation is not {pending}")
    })
}

fn check_page_counts(id: RequestId, state: &RequestState) -> Check {
    let mut counts = BTreeMap::new();
    for &page in state.states() {
        *counts.entry(page).or_insert(0_u32) += 1;
    }
    for (page, n) in counts {
        ensure(10, state.count(page) == n, || {
            format!("request {id} counts {} pages {page:?}, has {n}", state.count(page))
        })?;
    }
    Ok(())
}

/// What must hold right after a plan was carried out.
///
/// # Errors
/// The first rule that is broken.
pub fn check_plan(
    c: &Coordinator,
    plan: &StepPlan,
    gpu: &ToyPool,
    worker: &ToyWorker,
    scheduled: &[RequestId],
) -> Check {
    for &block in &plan.transfers.resident_blocks {
        let held = block == 0 || gpu.refs().get(block.unsigned_abs() as usize) > Some(&0);
        ensure(2, held, || format!("the plan copies GPU block {block}, which nobody holds"))?;
    }
    worker_tables_agree(c, worker, scheduled)?;
    pressure_is_answered(c, plan, gpu)
}

/// The state rows of scheduled requests say what the Coordinator says.
fn worker_tables_agree(c: &Coordinator, worker: &ToyWorker, scheduled: &[RequestId]) -> Check {
    for &id in scheduled {
        let row = worker.rows.get(&signed(id.0)).cloned().unwrap_or_default();
        let n = c.num_pages(id).unwrap_or(0);
        for page in 0..n {
            let expected = c.resident_blocks(id, PageIndex(page)).unwrap_or(&[]);
            let got = row.residency.get(&signed(page)).map_or(&[][..], Vec::as_slice);
            ensure(2, got == expected, || {
                format!("request {id} page {page}: the workers have {got:?}, not {expected:?}")
            })?;
        }
        let beyond = row.residency.keys().find(|&&page| page.unsigned_abs() >= n);
        ensure(2, beyond.is_none(), || format!("request {id} has a stale page {beyond:?}"))?;
        let hot = c.inspect();
        let held = hot.requests.iter().find(|(r, _)| *r == id).map(|(_, s)| s.hot.blocks());
        ensure(9, held == Some(&row.hot[..]), || {
            format!("request {id}: the workers have hot region {:?}, not {held:?}", row.hot)
        })?;
    }
    Ok(())
}

/// While the pool is short and no older request is asked to take a hot region, a request that has
/// one keeps no page that it could give up; and a request is asked to take a region only if that frees more than it costs.
fn pressure_is_answered(c: &Coordinator, plan: &StepPlan, gpu: &ToyPool) -> Check {
    let view = c.inspect();
    let config = c.config();
    if !config.transition {
        return Ok(());
    }
    let short = gpu.num_free() < config.watermark() && plan.hot_regions_wanted.is_empty();
    for (id, state) in view.requests.iter().filter(|(_, s)| s.phase == Phase::Live) {
        let tail = state.num_pages().saturating_sub(TAIL_PAGES) as usize;
        let body = &state.states()[..tail];
        let kept = body.iter().filter(|&&page| page == PageState::Clean).count();
        ensure(10, !short || !state.hot.is_held() || kept == 0, || {
            format!("request {id} keeps {kept} clean pages with {} blocks free", gpu.num_free())
        })?;
        if plan.hot_regions_wanted.contains(&signed(id.0)) {
            use PageState as S;
            let gain = body.iter().filter(|s| matches!(s, S::Clean | S::Enqueued | S::Spilling));
            let gain = gain.count() * config.num_kv_groups as usize;
            ensure(5, gain > config.hot_region_blocks() as usize, || {
                format!("request {id} would give up {gain} blocks for a hot region")
            })?;
        }
    }
    Ok(())
}
