// SPDX-License-Identifier: Apache-2.0
//! Owns a naive model of resolve, written from the contract with ordered maps and scans only.
//! Shares no code and no data structure with the data plane.

use std::collections::{BTreeMap, BTreeSet};

/// One hot slot: what it holds and when it was last read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) holds: Option<i64>,
    pub(crate) last_used: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NaiveState {
    pub(crate) slots: Vec<Slot>,
    pub(crate) epoch: u64,
}

impl NaiveState {
    pub(crate) fn new(hot_rows: usize) -> Self {
        Self { slots: vec![Slot { holds: None, last_used: 0 }; hot_rows], epoch: 0 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    Nowhere,
    Gpu(i64),
    Host(i64),
}

/// One request, tables as ordinary integers.
pub(crate) struct NaiveInput {
    pub(crate) rows: Vec<(Vec<i64>, i64)>,
    pub(crate) resident: Vec<i64>,
    pub(crate) host: Vec<i64>,
    pub(crate) hot: Vec<i64>,
    pub(crate) block_size: i64,
    pub(crate) stride: i64,
}

#[derive(Default, Debug, PartialEq, Eq)]
pub(crate) struct NaiveOutput {
    pub(crate) physical: Vec<Vec<i64>>,
    pub(crate) valid: Vec<usize>,
    pub(crate) copies: Vec<(i64, i64)>,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) overflow: u64,
}

fn find(input: &NaiveInput, position: i64, seq_len: i64) -> Found {
    if position < 0 || position >= seq_len {
        return Found::Nowhere;
    }
    let page = usize::try_from(position / input.block_size).unwrap();
    let offset = position % input.block_size;
    if page >= input.resident.len() {
        Found::Nowhere
    } else if input.resident[page] != 0 {
        Found::Gpu(input.resident[page] * input.stride + offset)
    } else if input.host[page] != 0 {
        Found::Host(input.host[page] * input.block_size + offset)
    } else {
        Found::Nowhere
    }
}

pub(crate) fn naive_resolve(input: &NaiveInput, state: &mut NaiveState) -> NaiveOutput {
    let found: Vec<Vec<Found>> = input
        .rows
        .iter()
        .map(|(topk, seq_len)| topk.iter().map(|&p| find(input, p, *seq_len)).collect())
        .collect();
    let union: BTreeSet<i64> = found
        .iter()
        .flatten()
        .filter_map(|f| if let Found::Host(row) = f { Some(*row) } else { None })
        .collect();
    let mut output = NaiveOutput::default();
    let mut slot_of: BTreeMap<i64, usize> = BTreeMap::new();
    let has_region = !input.hot.is_empty() && !input.hot.contains(&0);
    if !union.is_empty() && has_region {
        state.epoch += 1;
        for (index, slot) in state.slots.iter().enumerate() {
            if let Some(row) = slot.holds.filter(|row| union.contains(row)) {
                slot_of.insert(row, index);
            }
        }
        output.hits = slot_of.len() as u64;
        let mut victims: Vec<usize> =
            (0..state.slots.len()).filter(|i| !slot_of.values().any(|s| s == i)).collect();
        victims.sort_by_key(|&i| (state.slots[i].last_used, i));
        let misses: Vec<i64> = union.iter().copied().filter(|r| !slot_of.contains_key(r)).collect();
        for (row, victim) in misses.iter().zip(victims) {
            state.slots[victim].holds = Some(*row);
            slot_of.insert(*row, victim);
            output.copies.push((*row, hot_row(input, victim)));
        }
        for &index in slot_of.values() {
            state.slots[index].last_used = state.epoch;
        }
    }
    output.misses = union.len() as u64 - output.hits;
    output.overflow = output.misses - output.copies.len() as u64;
    for row in &found {
        let mut physical: Vec<i64> = row
            .iter()
            .filter_map(|f| match f {
                Found::Nowhere => None,
                Found::Gpu(row) => Some(*row),
                Found::Host(row) => slot_of.get(row).map(|&slot| hot_row(input, slot)),
            })
            .collect();
        output.valid.push(physical.len());
        physical.resize(row.len(), -1);
        output.physical.push(physical);
    }
    output
}

fn hot_row(input: &NaiveInput, slot: usize) -> i64 {
    let slot = i64::try_from(slot).unwrap();
    let block = usize::try_from(slot / input.block_size).unwrap();
    input.hot[block] * input.stride + slot % input.block_size
}
