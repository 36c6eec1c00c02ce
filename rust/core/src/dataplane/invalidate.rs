// SPDX-License-Identifier: Apache-2.0
//! Owns which hot slots lose their row because its source changed.

use super::hot_state::HotState;
use super::row_table::RowTable;

/// Memory that invalidations reuse.
#[derive(Debug, Clone, Default)]
pub struct InvalidateScratch {
    rows: RowTable,
    blocks: RowTable,
}

/// Frees every hot slot whose host row was rewritten this step or lies in a recycled host block.
/// `states` are those of every active state row and index group; negative ids are ignored.
/// Returns the hot slots freed.
pub fn invalidate<'s>(
    states: impl IntoIterator<Item = &'s mut HotState>,
    rewritten_host_rows: &[i64],
    recycled_host_blocks: &[i32],
    block_size: u32,
    scratch: &mut InvalidateScratch,
) -> u64 {
    let InvalidateScratch { rows, blocks } = scratch;
    rows.clear_for(rewritten_host_rows.len());
    blocks.clear_for(recycled_host_blocks.len());
    for &row in rewritten_host_rows {
        // OK to drop rows that do not fit: a row map holds int32 rows only.
        if let Some(row) = i32::try_from(row).ok().filter(|&row| row >= 0) {
            rows.insert(row);
        }
    }
    for &block in recycled_host_blocks.iter().filter(|&&block| block >= 0) {
        blocks.insert(block);
    }
    if rows.rows().is_empty() && blocks.rows().is_empty() {
        return 0;
    }
    let block_size = i32::try_from(block_size.max(1)).unwrap_or(i32::MAX);
    let mut freed = 0;
    for state in states {
        for hot_slot in 0..state.hot_rows() {
            let row = state.row_map[hot_slot];
            if row < 0 {
                continue;
            }
            if rows.get(row).is_some() || blocks.get(row / block_size).is_some() {
                state.free(hot_slot);
                freed += 1;
            }
        }
    }
    freed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(row_map: &[i32]) -> HotState {
        HotState { row_map: row_map.to_vec(), last_used: vec![3; row_map.len()], epoch: 3 }
    }

    #[test]
    fn rewritten_rows_and_recycled_blocks_leave_every_state_and_nothing_else_does() {
        let mut states = [state(&[16, 31, 32, 47, 48]), state(&[33, 15])];
        let freed = invalidate(
            &mut states,
            &[33, 48, -1, i64::from(u32::MAX) + 33],
            &[1, -1],
            16,
            &mut InvalidateScratch::default(),
        );
        assert_eq!(states[0].row_map, [-1, -1, 32, 47, -1]);
        assert_eq!(states[0].last_used, [0, 0, 3, 3, 0]);
        assert_eq!(states[1].row_map, [-1, 15]);
        assert_eq!(freed, 4);
        assert_eq!(states[0].epoch, 3);
    }

    #[test]
    fn nothing_rewritten_frees_nothing() {
        let mut states = [state(&[0, 1])];
        let before = states.clone();
        let freed = invalidate(&mut states, &[-1], &[], 16, &mut InvalidateScratch::default());
        assert_eq!((freed, &states), (0, &before));
    }
}
