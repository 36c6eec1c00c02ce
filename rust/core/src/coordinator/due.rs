// SPDX-License-Identifier: Apache-2.0
//! Owns what is handed out between forward passes: work that is due, and residency rows.

use super::Coordinator;
use crate::error::Result;
use crate::ids::RequestId;
use crate::step::StepPlan;

impl Coordinator {
    /// Packages what can be done without a forward pass into `plan`: restores, copies that are
    /// made again, releases, publications and retired requests. An engine that calls it when the
    /// workers have reported gets blocks back one step earlier than by the next step's plan.
    ///
    /// Transfers in it belong before the next forward pass. Recycled host blocks, residency and
    /// hot regions stay for the next step's plan.
    ///
    /// # Errors
    /// `ShutDown`; `plan` is empty then.
    pub fn build_due_plan(&mut self, plan: &mut StepPlan) -> Result<()> {
        plan.clear();
        self.check_running()?;
        plan.step = self.step;
        self.plan_queued_transfers(plan);
        self.release_granted();
        self.flush(plan);
        Ok(())
    }

    /// Packages the residency of live requests into `plan`, as the next step's plan would, and
    /// says whether all their pages are readable in GPU blocks.
    ///
    /// # Errors
    /// `UnknownRequest`; nothing has changed then and `plan` is empty.
    pub fn take_residency(&mut self, requests: &[RequestId], plan: &mut StepPlan) -> Result<()> {
        plan.clear();
        self.check_running()?;
        for &request in requests {
            self.live(request)?;
        }
        plan.step = self.step;
        for &request in requests {
            self.package_residency(request, plan);
        }
        Ok(())
    }
}
