// SPDX-License-Identifier: Apache-2.0
//! Owns which layers share one indexer result: layer -> KV cache group, index group and role.

use core::ops::Range;

use crate::error::{Error, Expected, Result};
use crate::geometry::Geometry;

/// What a layer does for its index group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerRole {
    /// Its indexer selects rows and its resolve fills the hot region of the whole group.
    Leader,
    /// It reads the leader's physical top-k.
    Follower,
}

/// Layers that share one top-k, hence one set of misses. Its layers have consecutive numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexGroup {
    /// Number over the whole model.
    pub id: u32,
    /// KV cache group that holds the pages of all its layers.
    pub kv_group: u32,
    /// Its leader.
    pub first_layer: u32,
    /// Layers, leader counted.
    pub num_layers: u32,
    /// True if its layers are draft layers, which run after the target's forward pass.
    pub is_draft: bool,
}

impl IndexGroup {
    /// The layer whose indexer the group uses.
    #[must_use]
    pub const fn leader(&self) -> u32 {
        self.first_layer
    }

    /// All layers, leader first.
    #[must_use]
    pub const fn layers(&self) -> Range<u32> {
        self.first_layer..self.first_layer + self.num_layers
    }

    /// The layers after the leader.
    #[must_use]
    pub const fn followers(&self) -> Range<u32> {
        self.first_layer + 1..self.first_layer + self.num_layers
    }
}

/// All index groups of a model, found by number, by KV cache group and by layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexGroupTopology {
    groups: Vec<IndexGroup>,
    /// `[G + 1]` first index group of each KV cache group, then the number of index groups.
    first_of_kv_group: Vec<usize>,
    /// `[layers]` index group of each layer.
    group_of_layer: Vec<usize>,
}

impl IndexGroupTopology {
    /// Reads the packing out of `geometry`; `draft_layers` are the layer numbers of MTP heads.
    ///
    /// # Errors
    /// `Config` for a draft layer that the model has not, or for an index group that mixes draft
    /// and target layers: their rows are written at different times, so one copy list could not
    /// serve both.
    pub fn new(geometry: &Geometry, draft_layers: &[u32]) -> Result<Self> {
        for &layer in draft_layers {
            if layer >= geometry.num_layers() {
                return Err(Error::Config {
                    name: "draft layer",
                    got: i64::from(layer),
                    expected: Expected::AtMost(i64::from(geometry.num_layers()) - 1),
                    remedy: "number draft layers as the packing does",
                });
            }
        }
        let mut groups: Vec<IndexGroup> = Vec::new();
        let mut first_of_kv_group = Vec::new();
        let mut group_of_layer = Vec::new();
        for (layer, place) in (0_u32..).zip(geometry.layers()) {
            if place.layer_in_index_group == 0 {
                if first_of_kv_group.len() <= place.kv_group as usize {
                    first_of_kv_group.push(groups.len());
                }
                groups.push(IndexGroup {
                    id: place.index_group,
                    kv_group: place.kv_group,
                    first_layer: layer,
                    num_layers: place.index_group_layers,
                    is_draft: draft_layers.contains(&layer),
                });
            }
            group_of_layer.push(groups.len() - 1);
        }
        first_of_kv_group.push(groups.len());
        for group in &groups {
            let drafts = group.layers().filter(|layer| draft_layers.contains(layer)).count();
            if drafts != 0 && drafts != group.num_layers as usize {
                return Err(Error::Config {
                    name: "draft layers of an index group",
                    got: i64::try_from(drafts).unwrap_or(i64::MAX),
                    expected: Expected::Exactly(i64::from(group.num_layers)),
                    remedy: "give draft layers an index group of their own",
                });
            }
        }
        Ok(Self { groups, first_of_kv_group, group_of_layer })
    }

    /// Index groups in their own order.
    #[must_use]
    pub fn groups(&self) -> &[IndexGroup] {
        &self.groups
    }

    /// Index groups whose pages lie in this KV cache group; empty for an unknown one.
    #[must_use]
    pub fn groups_of_kv_group(&self, kv_group: u32) -> &[IndexGroup] {
        let at = kv_group as usize;
        match (self.first_of_kv_group.get(at), self.first_of_kv_group.get(at + 1)) {
            (Some(&first), Some(&end)) => &self.groups[first..end],
            _ => &[],
        }
    }

    /// Index group of a layer, or `None` for an unknown layer.
    #[must_use]
    pub fn group_of_layer(&self, layer: u32) -> Option<&IndexGroup> {
        self.group_of_layer.get(layer as usize).map(|&group| &self.groups[group])
    }

    /// Role of a layer, or `None` for an unknown layer.
    #[must_use]
    pub fn role(&self, layer: u32) -> Option<LayerRole> {
        let group = self.group_of_layer(layer)?;
        Some(if group.leader() == layer { LayerRole::Leader } else { LayerRole::Follower })
    }

    /// True for a draft layer.
    #[must_use]
    pub fn is_draft_layer(&self, layer: u32) -> bool {
        self.group_of_layer(layer).is_some_and(|group| group.is_draft)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{HostLayout, LayerPacking};

    fn topology(kv_groups: &[&[u32]], draft_layers: &[u32]) -> Result<IndexGroupTopology> {
        let packing = LayerPacking { kv_groups: kv_groups.iter().map(|g| g.to_vec()).collect() };
        let geometry = Geometry::new(&packing, 64, 656, 8, 8, HostLayout::RowInterleaved)?;
        IndexGroupTopology::new(&geometry, draft_layers)
    }

    #[test]
    fn mixed_group_sizes_give_each_layer_its_group_and_role() {
        // The shape of a 78-layer IndexShare model with one draft layer, cut short: two single
        // layers, two groups of four, the draft layer alone.
        let t = topology(&[&[1, 1], &[4], &[4, 1]], &[10]).unwrap();
        let groups: Vec<_> = (0..11).map(|l| t.group_of_layer(l).unwrap().id).collect();
        assert_eq!(groups, [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]);
        let kv_groups: Vec<_> = (0..11).map(|l| t.group_of_layer(l).unwrap().kv_group).collect();
        assert_eq!(kv_groups, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
        let leaders: Vec<_> =
            (0..11).filter(|&l| t.role(l) == Some(LayerRole::Leader)).collect::<Vec<u32>>();
        assert_eq!(leaders, [0, 1, 2, 6, 10]);
        assert_eq!(t.groups()[3].followers(), 7..10);
        assert!(t.groups()[4].followers().is_empty());
        assert_eq!((0..11).filter(|&l| t.is_draft_layer(l)).collect::<Vec<_>>(), [10]);
    }

    #[test]
    fn a_kv_cache_group_lists_exactly_its_index_groups() {
        let t = topology(&[&[1, 1], &[4], &[4, 1]], &[]).unwrap();
        let ids = |kv| t.groups_of_kv_group(kv).iter().map(|g| g.id).collect::<Vec<_>>();
        assert_eq!((ids(0), ids(1), ids(2)), (vec![0, 1], vec![2], vec![3, 4]));
        assert_eq!((ids(3), ids(u32::MAX)), (vec![], vec![]));
    }

    #[test]
    fn an_unknown_layer_has_no_group_and_no_role() {
        let t = topology(&[&[2]], &[]).unwrap();
        assert_eq!((t.group_of_layer(2), t.role(2), t.is_draft_layer(2)), (None, None, false));
    }

    #[test]
    fn a_group_that_mixes_draft_and_target_layers_is_refused() {
        let error = topology(&[&[4]], &[3]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "draft layers of an index group is 1, expected exactly 4; \
             give draft layers an index group of their own"
        );
        assert!(topology(&[&[4], &[2]], &[4, 5]).unwrap().groups()[1].is_draft);
    }

    #[test]
    fn a_draft_layer_past_the_last_layer_is_refused() {
        assert!(matches!(topology(&[&[4]], &[4]), Err(Error::Config { got: 4, .. })));
    }
}
