// SPDX-License-Identifier: Apache-2.0
//! Owns the shapes that cross the Coordinator's border: events in, one `StepPlan` out.
//! Lists are flat and id arrays are `i32`, so that Python reads them without a copy.

use crate::error::Pool;
use crate::ids::{PageIndex, RequestId};
use crate::replay::ReplayPlan;

pub use crate::spill::{TransferAck, TransferKind};

/// Where the first pages of a request come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// Published host pages. Without GPU blocks they start host-only; with the blocks of a
    /// readable copy they start clean; with fresh blocks they are restored.
    Host,
    /// Pages that the engine found in its own GPU prefix cache and touched; no host copy.
    Gpu,
    /// Host pages that a sibling connector is about to fill, for this many tokens.
    Import {
        /// Tokens that the import brings.
        num_tokens: u32,
    },
    /// Published host pages first, then pages that a sibling connector is about to fill. The
    /// sibling may also bring nothing but KV of groups that are not the Coordinator's (indexer
    /// pages); then every page is a published one.
    PartialImport {
        /// Leading pages with a published host copy.
        host_pages: u32,
        /// Tokens that are computed once the import has ended, those of the host pages counted.
        num_tokens: u32,
    },
}

/// One admitted request and the pages it starts with.
#[derive(Debug, Clone, Copy)]
pub struct Admitted<'a> {
    /// Fresh id.
    pub request: RequestId,
    /// Source of the first pages; ignored when there are none.
    pub prefix: Prefix,
    /// Host blocks of those pages, one a page; empty with `Prefix::Gpu`.
    pub host_blocks: &'a [i32],
    /// GPU blocks `[page][G]`; empty or null blocks where a page has none.
    pub resident_blocks: &'a [i32],
}

/// Pages appended to a request's block table.
#[derive(Debug, Clone, Copy)]
pub struct PagesAllocated<'a> {
    /// The request.
    pub request: RequestId,
    /// Index of the first page; must equal the length of the block table.
    pub first_page: PageIndex,
    /// Host blocks, one a page; empty without a host pool.
    pub host_blocks: &'a [i32],
    /// GPU blocks `[page][G]`.
    pub resident_blocks: &'a [i32],
}

/// A hot region that a request got.
#[derive(Debug, Clone, Copy)]
pub struct HotRegionAllocated<'a> {
    /// The request.
    pub request: RequestId,
    /// `[G][blocks per hot group]`.
    pub blocks: &'a [i32],
}

/// What happened while one step was scheduled, apart from the requests that were freed.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepEvents<'a> {
    /// Unpinned blocks that the pool handed out.
    pub reused_blocks: &'a [i32],
    /// Admissions.
    pub admitted: &'a [Admitted<'a>],
    /// Further pages of running requests, and first pages beyond an admission's prefix.
    pub allocated: &'a [PagesAllocated<'a>],
    /// Hot regions.
    pub hot_regions: &'a [HotRegionAllocated<'a>],
    /// `[n]` with the scheduled requests: tokens that are certain now. An asynchronous engine
    /// schedules ahead of what it has sampled or verified; pages holding a later token are not
    /// sealed. Empty where all but the drafts are certain.
    pub known_tokens: &'a [u32],
}

/// One request of the coming forward pass, in batch order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduled {
    /// The request.
    pub request: RequestId,
    /// Tokens whose KV rows are valid before the step.
    pub num_computed_tokens: u32,
    /// Tokens that the step computes, drafts counted.
    pub num_scheduled_tokens: u32,
    /// Drafts among them, at the end: their rows are provisional.
    pub num_draft_tokens: u32,
}

/// Blocks that the engine's pools could hand out now, unpinned ones counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolLevels {
    /// Free or unpinned GPU blocks.
    pub gpu_free: u32,
    /// Free host blocks, evictable prefix blocks counted.
    pub host_free: u32,
}

/// How an import ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The first `num_tokens` tokens landed on every rank.
    Landed {
        /// Tokens whose rows are valid.
        num_tokens: u32,
    },
    /// Nothing can be trusted.
    Failed,
}

/// Why a request leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FreeReason {
    /// It ended; its durable pages may be published, later ones as their copies complete.
    Finished,
    /// It lost its blocks and will be admitted again; nothing more is published.
    Preempted,
    /// It was cancelled; treated like a finish, because its computed rows are just as good.
    Aborted,
}

/// What the engine asks before it admits a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionQuery {
    /// Tokens that admission must have room for (the whole prompt when it is reserved in full).
    pub num_tokens: u32,
    /// Leading pages with a published host copy.
    pub host_prefix_pages: u32,
    /// Leading pages whose GPU blocks come with the prefix hit at no cost.
    pub gpu_prefix_pages: u32,
}

/// What admission takes from the pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionCost {
    /// GPU blocks, hot region counted.
    pub gpu_blocks: u32,
    /// New host blocks.
    pub host_blocks: u32,
    /// True if a hot region must be allocated with the admission.
    pub hot_region: bool,
}

/// The answer to an `AdmissionQuery`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// There is room.
    Fits(AdmissionCost),
    /// There is not, and why.
    Refused(Refusal),
}

/// Why a request was not admitted or could not get a hot region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Too few blocks now.
    Short {
        /// Which pool.
        pool: Pool,
        /// Blocks needed.
        need: u32,
        /// Blocks free or unpinned.
        free: u32,
        /// True if transfers under way will free some: wait, do not preempt.
        reclaiming: bool,
    },
    /// The request can never fit.
    NeverFits {
        /// Which pool.
        pool: Pool,
        /// Blocks needed.
        need: u32,
        /// Blocks of the pool.
        total: u32,
    },
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Short { pool, need, free, reclaiming } => {
                write!(f, "{pool} has {free} free blocks, {need} are needed")?;
                if *reclaiming { f.write_str("; copies under way will free some") } else { Ok(()) }
            }
            Self::NeverFits { pool, need, total } => {
                write!(f, "{pool} has {total} blocks, {need} are needed")
            }
        }
    }
}

/// Copies to put in stream order, parallel arrays of one length n.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransferList {
    /// `[n]` ids for the acknowledgements.
    pub transfer_id: Vec<i64>,
    /// `[n]` `TransferKind` numbers.
    pub kind: Vec<u8>,
    /// `[n]` 1 if the copy must come after this step's forward pass, 0 if before.
    pub after_forward: Vec<u8>,
    /// `[n]` host block of the page (destination of a `HostCopy`).
    pub host_block: Vec<i32>,
    /// `[n]` source of a `HostCopy`, else the null block.
    pub source_host_block: Vec<i32>,
    /// `[n]` rows from the start of the page that matter.
    pub num_rows: Vec<i32>,
    /// `[n][G]` GPU blocks of the page (null for a `HostCopy`).
    pub resident_blocks: Vec<i32>,
}

/// Changes of the device's residency table, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResidencyDeltas {
    /// Requests whose state row must be zeroed first: it may hold another request's pages.
    pub cleared: Vec<i32>,
    /// `[n]` request.
    pub request: Vec<i32>,
    /// `[n]` page.
    pub page: Vec<i32>,
    /// `[n][G]` GPU blocks, the null block where the page is host-only.
    pub blocks: Vec<i32>,
}

/// Hot regions that start to be read this step: their row maps must be emptied first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HotRegions {
    /// `[n]` request.
    pub request: Vec<i32>,
    /// `[n][G][blocks per hot group]`.
    pub blocks: Vec<i32>,
}

/// Host pages whose prefix may be found by others from now on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publications {
    /// `[n]` request; possibly a finished one that is not retired yet.
    pub request: Vec<i32>,
    /// `[n]` leading pages that are durable: publish all of them that are not published.
    pub num_pages: Vec<i32>,
}

/// Everything the engine and the workers must do for one step. Apply in the order of the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Number of the step, from 1.
    pub step: u64,
    /// GPU blocks to take one more lease on (may repeat).
    pub touch_gpu: Vec<i32>,
    /// Host blocks to take one more lease on.
    pub touch_host: Vec<i32>,
    /// Publications, before the host blocks below are freed.
    pub publish: Publications,
    /// GPU blocks to give up but watch: the first to be reused comes first. A pool that reuses in
    /// the order of release frees `free_gpu` before it unpins these, because they are readable.
    pub unpin_gpu: Vec<i32>,
    /// GPU blocks to free.
    pub free_gpu: Vec<i32>,
    /// Host blocks to free.
    pub free_host: Vec<i32>,
    /// Requests that should get a hot region before their next step.
    pub hot_regions_wanted: Vec<i32>,
    /// Requests whose hot region is in `free_gpu`.
    pub hot_regions_returned: Vec<i32>,
    /// Hot regions that start to be read.
    pub hot_regions: HotRegions,
    /// Host blocks that got new contents: hot rows read from them are stale.
    pub recycled_host_blocks: Vec<i32>,
    /// Copies.
    pub transfers: TransferList,
    /// Residency table changes of the scheduled requests.
    pub residency: ResidencyDeltas,
    /// True if no scheduled request reads a host-only page.
    pub all_context_resident: bool,
    /// Verification rows and their bounds.
    pub replay: ReplayPlan,
    /// `(request, page)` whose only copy was lost: preempt the request, recompute from the page.
    pub lost_pages: Vec<(i32, i32)>,
    /// Requests that were refused a hot region, and why.
    pub refusals: Vec<(i32, Refusal)>,
    /// Freed requests whose last transfer has ended: their ids may be used again.
    pub retired: Vec<i32>,
}

impl StepPlan {
    /// Empties every list and keeps its memory.
    pub fn clear(&mut self) {
        let Self {
            step,
            touch_gpu,
            touch_host,
            publish,
            unpin_gpu,
            free_gpu,
            free_host,
            hot_regions_wanted,
            hot_regions_returned,
            hot_regions,
            recycled_host_blocks,
            transfers,
            residency,
            all_context_resident,
            replay,
            lost_pages,
            refusals,
            retired,
        } = self;
        *step = 0;
        *all_context_resident = true;
        for list in [
            touch_gpu,
            touch_host,
            unpin_gpu,
            free_gpu,
            free_host,
            hot_regions_wanted,
            hot_regions_returned,
            recycled_host_blocks,
            retired,
        ] {
            list.clear();
        }
        publish.request.clear();
        publish.num_pages.clear();
        hot_regions.request.clear();
        hot_regions.blocks.clear();
        transfers.transfer_id.clear();
        transfers.kind.clear();
        transfers.after_forward.clear();
        transfers.host_block.clear();
        transfers.source_host_block.clear();
        transfers.num_rows.clear();
        transfers.resident_blocks.clear();
        residency.cleared.clear();
        residency.request.clear();
        residency.page.clear();
        residency.blocks.clear();
        replay.clear();
        lost_pages.clear();
        refusals.clear();
    }
}

/// What the engine must do with the GPU blocks of a request that leaves. Host blocks that the
/// request leased are the engine's to free, after the publication.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreePlan {
    /// Leading pages to publish now, before the request's host blocks are freed.
    pub publish_pages: u32,
    /// GPU blocks to give up but watch: the first to be reused comes first.
    pub unpin_gpu: Vec<i32>,
    /// GPU blocks to free, hot region counted.
    pub free_gpu: Vec<i32>,
    /// True if the id may be used again at once; else wait for `StepPlan::retired`.
    pub retired: bool,
}
