# SPDX-License-Identifier: Apache-2.0
"""Owns what the pool ops say to a tracer, and that numbers of bound ops are checked."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels import torch_pool_ops  # noqa: E402

WRITTEN = {
    "mirror_rows": {"mask", "counters", "host_layers"},
    "report_mirrored": {"missing_rows", "counters"},
    "spill_pages": {"counters", "host_layers"},
    "restore_pages": {"counters", "gpu_layers"},
    "stage_prefill": {"counters", "workspace"},
    "invalidate": {"row_maps", "last_used", "holders", "masks", "freed"},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_pool_op_says_what_it_writes(name: str) -> None:
    schema = getattr(torch.ops.hotpage, name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == WRITTEN[name]


def test_a_pool_op_traces_with_fakes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        some = torch.zeros(4, dtype=torch.int32, device="cuda")
        host = [torch.zeros((4, 16, 32), dtype=torch.uint8)]
        gpu = [torch.zeros((4, 16, 32), dtype=torch.uint8, device="cuda")]
        spill = torch.ops.hotpage.spill_pages
        assert spill(7, some, some.view(4, 1), some, some, gpu, host, 3) is None


def test_a_number_that_is_not_bound_is_refused() -> None:
    some = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ConfigError, match="bound op 999 is nothing, expected ReportMirrored"):
        torch.ops.hotpage.report_mirrored(999, some, some, some, some, 1)
    with pytest.raises(ConfigError, match="no bound op 999"):
        torch_pool_ops.release(999)
