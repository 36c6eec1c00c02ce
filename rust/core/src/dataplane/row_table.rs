// SPDX-License-Identifier: Apache-2.0
//! Owns the set of distinct host rows of one resolve, numbered in the order of insertion.

const FREE: i32 = -1;

/// Open-addressed, at most half full, emptied in time proportional to what it held.
#[derive(Debug, Clone, Default)]
pub(super) struct RowTable {
    /// `[power of two]` (row or `FREE`, its number).
    cells: Vec<(i32, u32)>,
    /// Cells in use, by number.
    used_cells: Vec<u32>,
    /// Rows by number.
    rows: Vec<i32>,
    shift: u32,
}

impl RowTable {
    /// Empties the table and makes room for `capacity` distinct rows.
    pub(super) fn clear_for(&mut self, capacity: usize) {
        let len = (2 * capacity).next_power_of_two().max(2);
        if len > self.cells.len() {
            self.cells.clear();
            self.cells.resize(len, (FREE, 0));
            self.shift = 32 - len.ilog2();
        } else {
            for &cell in &self.used_cells {
                self.cells[cell as usize].0 = FREE;
            }
        }
        self.used_cells.clear();
        self.rows.clear();
    }

    /// Distinct rows, by number.
    pub(super) fn rows(&self) -> &[i32] {
        &self.rows
    }

    /// Number of `row` (not negative), which is added if it is new.
    #[inline]
    pub(super) fn insert(&mut self, row: i32) -> u32 {
        let mut at = self.home(row);
        loop {
            let (held, number) = self.cells[at];
            if held == row {
                return number;
            }
            if held == FREE {
                break;
            }
            at = (at + 1) & (self.cells.len() - 1);
        }
        debug_assert!(2 * self.rows.len() < self.cells.len(), "the table keeps a free cell");
        // OK because the table has fewer than 2^32 cells.
        let number = self.rows.len() as u32;
        self.cells[at] = (row, number);
        self.used_cells.push(at as u32);
        self.rows.push(row);
        number
    }

    /// Number of `row` (not negative) if it is in the table.
    #[inline]
    pub(super) fn get(&self, row: i32) -> Option<u32> {
        let mut at = self.home(row);
        loop {
            let (held, number) = self.cells[at];
            if held == row {
                return Some(number);
            }
            if held == FREE {
                return None;
            }
            at = (at + 1) & (self.cells.len() - 1);
        }
    }

    /// Multiplicative hashing: rows of one page are consecutive and must not collide.
    #[inline]
    fn home(&self, row: i32) -> usize {
        // OK because rows are not negative.
        ((row as u32).wrapping_mul(0x9E37_79B1) >> self.shift) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_their_number_and_clearing_forgets_them() {
        let mut table = RowTable::default();
        table.clear_for(4);
        let numbers: Vec<u32> = [5, i32::MAX, 5, 0, 6].map(|row| table.insert(row)).to_vec();
        assert_eq!(numbers, [0, 1, 0, 2, 3]);
        assert_eq!(table.rows(), [5, i32::MAX, 0, 6]);
        assert_eq!((table.get(0), table.get(1)), (Some(2), None));
        table.clear_for(4);
        assert_eq!([5, i32::MAX, 0, 6].map(|row| table.get(row)), [None; 4]);
        table.clear_for(1000);
        for row in (0..1000).rev() {
            table.insert(row * 64);
        }
        assert!((0..1000).all(|row| table.get(row * 64) == Some(999 - row as u32)));
    }
}
