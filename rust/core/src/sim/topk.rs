// SPDX-License-Identifier: Apache-2.0
//! Owns synthetic top-k streams: seeded, and with the locality of a real indexer's selections.
//!
//! # Model
//!
//! A stream is a *reuse-depth* process. It keeps the positions it selected, most recent first (the
//! history); a reference's depth is its place in that order, so LRU with B hot rows misses exactly
//! the references deeper than B. The law of the depth is therefore the LRU miss curve itself, and
//! the published one (missed references over k: 30.0% with k hot rows, 13.4% with 2k, 6.7% with
//! 4k) is a parameter ([`ReuseTail`]) instead of the outcome of a fit. A step's k positions are
//!
//! - *sinks and window*: the first and the newest positions, always. A token enters as the newest
//!   one, and is one of the step's misses that no policy avoids.
//! - *core*: a part of the last step's positions that carries a mark. A core position is selected
//!   in most steps, and one that was left out is the first to come back. The mark is lost after a
//!   while to another position. The core moves no LRU figure (the other parts make room for it);
//!   it tells the policies apart, because what was copied long ago is then worth more than its
//!   age says. The default makes FIFO as much worse than LRU as published.
//! - *survivors*: ordinary positions of the last step; as many as it takes for the expected miss
//!   fraction at B = k to be the given one, whatever the sizes of the parts above.
//! - *re-used* positions, with a depth from the tail beyond k: about 1 / depth, a heavy tail. It
//!   makes the working set drift instead of jump. Core positions near that depth are preferred.
//! - *fresh* positions, uniform over everything that the history does not hold.
//!
//! Depths count in multiples of k and fresh draws in shares of k, so that a stream scaled down with
//! its context keeps its miss fractions. A context shorter than the history has no fresh draws, and
//! fewer misses: there is less to choose from.
//!
//! The law of the depth refers to no position's value, so a history of uniform draws is as good as
//! any: a stream starts at any sequence length, such as that of a re-used prefix, and its misses are
//! stationary from the first row on.
//!
//! Verification rows are consecutive queries, as consecutive decode steps are, and are generated
//! alike. A draft that is rejected has still been attended with, so its selections stay in the
//! history, except for positions that the sequence lost.
//!
//! Index groups of one request see one stream, each through its own permutation ([`GroupView`])
//! that leaves most positions alone: groups overlap and never become equal, and each has the
//! stream's locality. How much they overlap by default is an assumption, not a measured figure.
//!
//! Only integer and correctly rounded operations are used: equal seeds and calls give equal streams
//! on every platform.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::error::Result;
use crate::sim::rng::{SplitMix64, derive};

mod group;
mod params;
mod tail;

pub use group::GroupView;
pub use params::TopkParams;
use tail::TailSampler;
pub use tail::{ReuseTail, TAIL_DEPTHS};

/// Positions are below this; a longer sequence is treated as one of this length.
pub const MAX_POSITIONS: u32 = 1 << 30;

/// Marks a history entry of the core.
const CORE: u32 = 1 << 31;
/// Marks a history entry that the current step has selected; set only while a step is built.
const SELECTED: u32 = 1 << 30;
/// The position of a history entry.
const POSITION: u32 = MAX_POSITIONS - 1;

/// Length of the history in multiples of k: where the tail's law ends and fresh draws begin.
const HISTORY_DEPTH: u32 = TAIL_DEPTHS[TAIL_DEPTHS.len() - 1];

/// Re-use prefers a core position within this part of k behind the depth it draws (at least
/// `MIN_CORE_REACH` entries): near enough not to bend the tail.
const CORE_REACH_DIVISOR: u32 = 128;
const MIN_CORE_REACH: u32 = 4;

/// Draws of a fresh position before the history is searched instead: reached only when the history
/// holds nearly the whole sequence.
const FRESH_TRIES: u32 = 32;

/// The top-k stream of one request or of one of its index groups. Time and memory are O(k) per row
/// and stream, whatever the sequence length: a list and a set of 8k positions, about 230 KB at
/// k = 2,048.
#[derive(Debug, Clone)]
pub struct TopkStream {
    params: TopkParams,
    tail: TailSampler,
    key: u64,
    view: Option<GroupView>,
    /// Rows generated so far.
    row: u64,
    /// Length that the last row saw; 0 without a history.
    seq_len: u32,
    /// Positions with marks, most recent row first; at most `HISTORY_DEPTH * k`.
    history: Vec<u32>,
    /// The same positions. Only asked for membership, so the hasher decides nothing.
    tracked: HashSet<u32, BuildHasherDefault<DefaultHasher>>,
    /// Leading history entries that the last row selected.
    last: usize,
    /// The row under construction, marks included.
    selected: Vec<u32>,
    /// Its members that the history does not hold yet.
    inserted: usize,
}

impl TopkStream {
    /// The stream of a request.
    ///
    /// # Errors
    /// `Config` for a parameter out of bounds.
    pub fn new(params: TopkParams, seed: u64) -> Result<Self> {
        params.validate()?;
        Ok(Self {
            params,
            tail: params.reuse_tail.sampler(params.top_k),
            key: derive(seed, 0),
            view: None,
            row: 0,
            seq_len: 0,
            history: Vec::new(),
            tracked: HashSet::default(),
            last: 0,
            selected: Vec::new(),
            inserted: 0,
        })
    }

    /// The stream of one index group: that of the request with this seed, seen by the group. For
    /// many groups, one stream and a [`GroupView`] each take less memory and time.
    ///
    /// # Errors
    /// `Config` for a parameter out of bounds.
    pub fn for_group(params: TopkParams, seed: u64, group: u32) -> Result<Self> {
        let view = GroupView::new(&params, seed, group)?;
        Ok(Self { view: Some(view), ..Self::new(params, seed)? })
    }

    /// The parameters that the stream was made with.
    #[must_use]
    pub const fn params(&self) -> &TopkParams {
        &self.params
    }

    /// One decode step with one row: `out` becomes `[k]` distinct logical positions below
    /// `seq_len`, in no order that means anything; with `seq_len < k` all positions, then -1.
    /// The length may differ from the last one by any amount.
    pub fn next(&mut self, seq_len: u32, out: &mut Vec<i32>) {
        self.next_rows(seq_len, 1, out);
    }

    /// One step with `rows` verification rows: `out` becomes `[rows][k]`. The first row sees
    /// `seq_len` tokens, each later one sees one more.
    pub fn next_rows(&mut self, seq_len: u32, rows: u32, out: &mut Vec<i32>) {
        out.clear();
        for row in 0..rows {
            let visible = seq_len.saturating_add(row).min(MAX_POSITIONS);
            let base = out.len();
            if visible <= self.params.top_k {
                self.forget();
                out.extend(0..visible as i32);
            } else {
                self.select(visible);
                out.extend(self.selected.iter().map(|&entry| (entry & POSITION) as i32));
            }
            out.resize(base + self.params.top_k as usize, -1);
            self.row += 1;
        }
        if let Some(view) = self.view {
            view.apply(seq_len, out);
        }
    }

    fn forget(&mut self) {
        self.seq_len = 0;
        self.history.clear();
        self.tracked.clear();
        self.last = 0;
    }

    /// Builds one row in `selected` and moves it to the front of the history.
    fn select(&mut self, seq_len: u32) {
        let mut rng = SplitMix64::new(derive(self.key, self.row));
        self.selected.clear();
        self.inserted = 0;
        self.follow_length(seq_len, &mut rng);
        self.keep_last(seq_len, &mut rng);
        self.reuse_and_draw(seq_len, &mut rng);
        self.restack();
        self.seq_len = seq_len;
    }

    fn is_always_selected(&self, position: u32, seq_len: u32) -> bool {
        // OK because seq_len > k >= 2 * (sinks + window): no underflow, and the two do not meet.
        position < self.params.sink_tokens || position >= seq_len - self.params.window_tokens
    }

    fn capacity(&self, seq_len: u32) -> usize {
        (HISTORY_DEPTH * self.params.top_k).min(seq_len) as usize
    }

    /// Makes the history one of a sequence of `seq_len` tokens and selects what the window gained.
    fn follow_length(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        if self.seq_len == 0 {
            self.start(seq_len, rng);
            return;
        }
        let window = seq_len - self.params.window_tokens;
        if seq_len >= self.seq_len {
            for position in self.seq_len.max(window)..seq_len {
                self.insert(position);
            }
            // A short history holds the whole sequence and has to go on doing so.
            for position in self.seq_len..window {
                if self.history.len() + self.inserted >= self.capacity(seq_len) {
                    break;
                }
                self.tracked.insert(position);
                self.history.push(position);
            }
            return;
        }
        let kept = self.history.iter().take(self.last).filter(|&&e| (e & POSITION) < seq_len);
        self.last = kept.count();
        self.history.retain(|&entry| (entry & POSITION) < seq_len);
        self.tracked.retain(|&position| position < seq_len);
        let before = self.seq_len - self.params.window_tokens;
        for position in window..before.min(seq_len) {
            if !self.tracked.contains(&position) {
                self.insert(position);
            } else if let Some(index) = self.index_beyond_last(position) {
                self.take(index);
            }
        }
        self.fill(seq_len, rng);
    }

    fn index_beyond_last(&self, position: u32) -> Option<usize> {
        let beyond = self.history.iter().skip(self.last);
        beyond.map(|&entry| entry & POSITION).position(|p| p == position).map(|i| i + self.last)
    }

    /// Draws a stationary history whose first k entries stand for the row before the first.
    fn start(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        let always =
            (0..self.params.sink_tokens).chain(seq_len - self.params.window_tokens..seq_len);
        self.history.extend(always.clone());
        self.tracked.extend(always);
        self.fill(seq_len, rng);
        self.last = self.params.top_k as usize;
        let core = chance(f64::from(self.params.core_share_ppm) / 1e6);
        for entry in self.history.iter_mut().take(self.last) {
            if rng.next_u32() < core {
                *entry |= CORE;
            }
        }
    }

    /// Fills the history from behind with positions that it does not hold.
    fn fill(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        let capacity = self.capacity(seq_len) - self.inserted;
        // Draws find 98% of a sequence as long as the history, and more of a longer one; the rest
        // of a short sequence is swept up in order.
        for _ in 0..4 * capacity {
            if self.history.len() >= capacity {
                return;
            }
            let position = rng.below(seq_len);
            if self.tracked.insert(position) {
                self.history.push(position);
            }
        }
        for position in 0..seq_len {
            if self.history.len() >= capacity {
                return;
            }
            if self.tracked.insert(position) {
                self.history.push(position);
            }
        }
    }

    /// Selects a position that the history does not hold.
    fn insert(&mut self, position: u32) {
        self.tracked.insert(position);
        self.selected.push(position);
        self.inserted += 1;
    }

    /// Selects an entry of the history.
    fn take(&mut self, index: usize) {
        let entry = self.history[index];
        self.selected.push(entry);
        self.history[index] = entry | SELECTED;
    }

    /// Selects again what stays of the last row.
    fn keep_last(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        let (mut always, mut core) = (0, 0);
        for &entry in &self.history[..self.last] {
            let is_always = self.is_always_selected(entry & POSITION, seq_len);
            always += usize::from(is_always);
            core += usize::from(!is_always && entry & CORE != 0);
        }
        let presence = f64::from(self.params.core_presence_ppm) / 1e6;
        let survive = self.survival(seq_len, always, core, presence);
        let presence = chance(presence);
        let leave_core = f64::from(self.params.core_turnover_ppm) / 1e6;
        let share = f64::from(self.params.core_share_ppm) / 1e6;
        // Promotions balance what the core loses at its average size.
        let join_core = chance(leave_core * share / (1.0 - share));
        let leave_core = chance(leave_core);
        // OK because sinks and window take half a row at most: what the window gained and what it
        // keeps fit into one row together.
        let mut room = self.params.top_k as usize - self.selected.len() - always;
        for index in 0..self.last {
            let entry = self.history[index];
            let position = entry & POSITION;
            if self.is_always_selected(position, seq_len) {
                self.take(index);
                continue;
            }
            let noise = rng.next_u32();
            let was_core = entry & CORE != 0;
            let is_core = if was_core { noise >= leave_core } else { noise < join_core };
            self.history[index] = if is_core { position | CORE } else { position };
            let stays = noise < if was_core { presence } else { survive };
            if stays && room > 0 {
                self.take(index);
                room -= 1;
            }
        }
    }

    /// Chance, in 2^-32, that an ordinary position of the last row is selected again.
    fn survival(&self, seq_len: u32, always: usize, core: usize, presence: f64) -> u32 {
        let top_k = f64::from(self.params.top_k);
        // A sequence that is little longer than k must keep more than the tail says: at most half
        // of what lies outside the row can come in.
        let outside = f64::from(seq_len - self.params.top_k);
        let turnover = (top_k * self.params.reuse_tail.share(0)).min(outside / 2.0);
        let ordinary = self.last.saturating_sub(always + core);
        if ordinary == 0 {
            return 0;
        }
        chance((top_k - turnover - always as f64 - presence * core as f64) / ordinary as f64)
    }

    /// Completes the row with re-used and fresh positions.
    fn reuse_and_draw(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        let top_k = self.params.top_k as usize;
        // What the window gained is fresh already; it counts as such.
        let mut owed = self.inserted;
        let outside = seq_len as usize - self.tracked.len();
        let mut fresh = 0;
        while self.selected.len() + fresh < top_k {
            let depth = self.tail.depth(rng.unit()).filter(|&depth| depth < self.history.len());
            match depth {
                Some(depth) => self.reuse(depth),
                None if owed > 0 => owed -= 1,
                None if fresh < outside => fresh += 1,
                // The history holds everything: what would be fresh lies somewhere at its end.
                None => {
                    let from_end = rng.below(self.params.top_k) as usize + 1;
                    self.reuse(self.history.len().saturating_sub(from_end));
                }
            }
        }
        for _ in 0..fresh {
            self.draw_fresh(seq_len, rng);
        }
    }

    /// Selects an entry from `depth` on that is not selected yet: the first core entry within reach,
    /// else the first of all, round the end if need be.
    fn reuse(&mut self, depth: usize) {
        let free = |&index: &usize| self.history[index] & SELECTED == 0;
        let first = (depth..self.history.len()).find(free).or_else(|| (0..depth).find(free));
        // Always found, because history and row hold min(HISTORY_DEPTH * k, seq_len) > k positions
        // together, and the row is not complete.
        let Some(first) = first else { return };
        let reach = (self.params.top_k / CORE_REACH_DIVISOR).max(MIN_CORE_REACH) as usize;
        let near = self.history[first..].iter().take(reach);
        let core = near.map(|entry| entry & (CORE | SELECTED)).position(|marks| marks == CORE);
        self.take(first + core.unwrap_or(0));
    }

    fn draw_fresh(&mut self, seq_len: u32, rng: &mut SplitMix64) {
        for _ in 0..FRESH_TRIES {
            let position = rng.below(seq_len);
            if !self.tracked.contains(&position) {
                self.insert(position);
                return;
            }
        }
        self.reuse(self.history.len() / 2);
    }

    /// Moves the row to the front of the history and drops what exceeds the capacity.
    fn restack(&mut self) {
        let row = self.selected.len();
        let others = self.history.len() - (row - self.inserted);
        let limit = (HISTORY_DEPTH * self.params.top_k) as usize;
        let mut excess = (row + others).saturating_sub(limit);
        let new_len = row + others - excess;
        let mut read = self.history.len();
        while excess > 0 && read > 0 {
            read -= 1;
            let entry = self.history[read];
            if entry & SELECTED == 0 {
                self.tracked.remove(&(entry & POSITION));
                excess -= 1;
            }
        }
        if self.history.len() < new_len {
            self.history.resize(new_len, 0);
        }
        let mut write = new_len;
        // OK because write = row + unselected entries yet to be read, and at most `row` entries are
        // selected: an entry is read before it is overwritten, and write > 0. The store comes
        // without a branch, which would be mispredicted; what it leaves below `write` is
        // overwritten by the next store or by the row.
        for read in (0..read).rev() {
            let entry = self.history[read];
            self.history[write - 1] = entry;
            write -= usize::from(entry & SELECTED == 0);
        }
        self.history.truncate(new_len);
        self.history[..row].copy_from_slice(&self.selected);
        self.last = row;
    }
}

/// A probability as a bound for a 32-bit random number.
fn chance(probability: f64) -> u32 {
    // Saturates: 0 for a negative probability, and 1 - 2^-32 for 1 and above.
    (probability * (u64::from(u32::MAX) + 1) as f64) as u32
}

#[cfg(test)]
mod tests;
