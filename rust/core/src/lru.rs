// SPDX-License-Identifier: Apache-2.0
//! Owns the order in which requests give up residency: least recently scheduled first.

use crate::ids::RequestId;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
    listed: bool,
}

const UNLISTED: Link = Link { older: NONE, newer: NONE, listed: false };

/// Recency order of requests; every operation is O(1).
#[derive(Debug, Clone)]
pub struct RequestLru {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
}

impl Default for RequestLru {
    fn default() -> Self {
        Self { links: Vec::new(), oldest: NONE, newest: NONE }
    }
}

impl RequestLru {
    /// Makes `request` the most recent, listing it if it is not listed.
    pub fn touch(&mut self, request: RequestId) {
        self.remove(request);
        let index = request.index();
        if index >= self.links.len() {
            self.links.resize(index + 1, UNLISTED);
        }
        let newest = self.newest;
        if let Some(link) = self.links.get_mut(index) {
            *link = Link { older: newest, newer: NONE, listed: true };
        }
        match self.link(newest) {
            Some(link) => link.newer = request.0,
            None => self.oldest = request.0,
        }
        self.newest = request.0;
    }

    /// Takes `request` off the list, if it is listed.
    pub fn remove(&mut self, request: RequestId) {
        let Some(link) = self.links.get_mut(request.index()) else { return };
        if !link.listed {
            return;
        }
        let Link { older, newer, .. } = core::mem::replace(link, UNLISTED);
        match self.link(older) {
            Some(link) => link.newer = newer,
            None => self.oldest = newer,
        }
        match self.link(newer) {
            Some(link) => link.older = older,
            None => self.newest = older,
        }
    }

    /// Listed requests, least recent first.
    pub fn iter(&self) -> impl Iterator<Item = RequestId> + '_ {
        let mut next = self.oldest;
        core::iter::from_fn(move || {
            let link = self.links.get(next as usize)?;
            let request = RequestId(next);
            next = link.newer;
            Some(request)
        })
    }

    /// The least recent request.
    #[must_use]
    pub fn oldest(&self) -> Option<RequestId> {
        (self.oldest != NONE).then_some(RequestId(self.oldest))
    }

    /// The listed request that is next more recent than a listed one.
    #[must_use]
    pub fn newer_than(&self, request: RequestId) -> Option<RequestId> {
        let newer = self.links.get(request.index())?.newer;
        (newer != NONE).then_some(RequestId(newer))
    }

    fn link(&mut self, index: u32) -> Option<&mut Link> {
        // OK because NONE is past the end of any table that fits into memory.
        self.links.get_mut(index as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lru: &RequestLru) -> Vec<u32> {
        lru.iter().map(|r| r.0).collect()
    }

    #[test]
    fn the_least_recently_touched_request_comes_first() {
        let mut lru = RequestLru::default();
        for id in [3, 1, 2] {
            lru.touch(RequestId(id));
        }
        lru.touch(RequestId(3));
        assert_eq!(order(&lru), [1, 2, 3]);
        lru.remove(RequestId(2));
        lru.remove(RequestId(2));
        lru.remove(RequestId(77));
        assert_eq!(order(&lru), [1, 3]);
        lru.remove(RequestId(1));
        lru.remove(RequestId(3));
        assert_eq!(order(&lru), [0_u32; 0]);
        lru.touch(RequestId(5));
        assert_eq!(order(&lru), [5]);
    }
}
