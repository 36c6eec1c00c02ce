// SPDX-License-Identifier: Apache-2.0
//! Owns the names of requests: engine strings in, dense ids out, no id in use twice.

use std::collections::HashMap;

use crate::error::{ProtocolFault, Result};
use crate::ids::RequestId;

/// What an id is used for.
#[derive(Debug, Clone)]
enum Slot {
    /// The name leads to the id.
    Bound(Box<str>),
    /// The request was freed, its transfers have not ended: the id leads to the name, but the
    /// name may be bound to another id by now.
    Draining(Box<str>),
    /// Waits in the free list.
    Vacant,
}

/// Dense ids for the strings that an engine calls its requests by.
///
/// An id goes `bind` -> `unbind` (the request was freed) -> `retire` (the Coordinator reported
/// it), and only then to the next `bind`. The number of ids ever handed out is the largest number
/// of requests that were bound or draining at one time.
#[derive(Debug, Clone, Default)]
pub struct RequestInterner {
    ids: HashMap<Box<str>, RequestId>,
    slots: Vec<Slot>,
    vacant: Vec<RequestId>,
}

impl RequestInterner {
    /// An interner without names.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Names bound now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True if no name is bound.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Ids that are bound or draining.
    #[must_use]
    pub fn num_in_use(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Gives `name` an id that nothing else uses.
    ///
    /// # Errors
    /// `RequestInUse` if the name is bound; nothing has changed then.
    pub fn bind(&mut self, name: &str) -> Result<RequestId> {
        if let Some(&request) = self.ids.get(name) {
            return Err(ProtocolFault::RequestInUse { request }.into());
        }
        let slot = Slot::Bound(name.into());
        let request = match self.vacant.pop() {
            Some(request) => {
                if let Some(entry) = self.slots.get_mut(request.index()) {
                    *entry = slot;
                }
                request
            }
            None => {
                // OK because as many names as there are u32 values do not fit into memory.
                let request = RequestId(self.slots.len() as u32);
                self.slots.push(slot);
                request
            }
        };
        self.ids.insert(name.into(), request);
        Ok(request)
    }

    /// The id that `name` is bound to.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<RequestId> {
        self.ids.get(name).copied()
    }

    /// The name behind an id that is bound or draining.
    #[must_use]
    pub fn name(&self, request: RequestId) -> Option<&str> {
        match self.slots.get(request.index())? {
            Slot::Bound(name) | Slot::Draining(name) => Some(name),
            Slot::Vacant => None,
        }
    }

    /// Takes `name` off its id, `None` if it has none. The name may be bound again at once; the
    /// id stays in use until it is retired.
    pub fn unbind(&mut self, name: &str) -> Option<RequestId> {
        let (name, request) = self.ids.remove_entry(name)?;
        if let Some(slot) = self.slots.get_mut(request.index()) {
            *slot = Slot::Draining(name);
        }
        Some(request)
    }

    /// Lets unbound ids be used again.
    ///
    /// # Errors
    /// `RequestInUse` while a name is bound, `UnknownRequest` for an id that is not in use or is
    /// named twice; nothing has changed then.
    pub fn retire(&mut self, requests: &[RequestId]) -> Result<()> {
        let mut names = Vec::with_capacity(requests.len());
        for &request in requests {
            match self.vacate(request) {
                Ok(name) => names.push(name),
                Err(fault) => {
                    for (&earlier, name) in requests.iter().zip(names) {
                        if let Some(slot) = self.slots.get_mut(earlier.index()) {
                            *slot = Slot::Draining(name);
                        }
                    }
                    return Err(fault.into());
                }
            }
        }
        self.vacant.extend_from_slice(requests);
        Ok(())
    }

    fn vacate(&mut self, request: RequestId) -> Result<Box<str>, ProtocolFault> {
        match self.slots.get_mut(request.index()) {
            Some(Slot::Bound(_)) => Err(ProtocolFault::RequestInUse { request }),
            Some(slot) => match core::mem::replace(slot, Slot::Vacant) {
                Slot::Draining(name) => Ok(name),
                Slot::Bound(_) | Slot::Vacant => Err(ProtocolFault::UnknownRequest { request }),
            },
            None => Err(ProtocolFault::UnknownRequest { request }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_used_again_only_after_it_was_retired() {
        let mut interner = RequestInterner::new();
        let first = interner.bind("a").unwrap();
        assert_eq!(interner.unbind("a"), Some(first));
        let again = interner.bind("a").unwrap();
        assert_ne!(first, again, "the first admission may still have transfers in flight");
        assert_eq!(interner.name(first), Some("a"));
        assert_eq!(interner.name(again), Some("a"));
        interner.retire(&[first]).unwrap();
        assert_eq!(interner.name(first), None);
        assert_eq!(interner.get("a"), Some(again));
        assert_eq!(interner.bind("b").unwrap(), first);
    }

    #[test]
    fn ids_stay_dense_however_many_requests_pass() {
        let mut interner = RequestInterner::new();
        for round in 0..1000 {
            for seat in 0..3 {
                interner.bind(&format!("{round}-{seat}")).unwrap();
            }
            for seat in [1, 0, 2] {
                let id = interner.unbind(&format!("{round}-{seat}")).unwrap();
                assert!(id.index() < 3);
                interner.retire(&[id]).unwrap();
            }
        }
        assert!(interner.is_empty() && interner.num_in_use() == 0);
    }

    #[test]
    fn wrong_calls_are_faults_and_change_nothing() {
        let mut interner = RequestInterner::new();
        let id = interner.bind("a").unwrap();
        let in_use = ProtocolFault::RequestInUse { request: id };
        let unknown = |request| ProtocolFault::UnknownRequest { request };
        assert_eq!(interner.bind("a"), Err(in_use.clone().into()));
        assert_eq!(interner.retire(&[id]), Err(in_use.into()));
        let wild = RequestId(u32::MAX);
        assert_eq!(interner.retire(&[wild]), Err(unknown(wild).into()));
        assert_eq!(interner.unbind("b"), None);
        assert_eq!((interner.len(), interner.num_in_use()), (1, 1));
        interner.unbind("a").unwrap();
        assert_eq!(interner.retire(&[id, id]), Err(unknown(id).into()), "named twice");
        assert_eq!(interner.name(id), Some("a"), "still draining");
        interner.retire(&[id]).unwrap();
        assert_eq!(interner.retire(&[id]), Err(unknown(id).into()), "retired twice");
        assert_eq!(interner.bind("c").unwrap(), id);
        assert_eq!(interner.bind("d").unwrap(), RequestId(1), "the id was listed once");
    }
}
