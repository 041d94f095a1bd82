"""Upstream tests that pass on Gloo and that horon is not asked to pass, each with its reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {
    "test_sparse_all_reduce_sum": "horon refuses sparse tensors by design: a clear error instead",
    "test_ddp_logging_data_cpu": "asserts the type name and the gloo_* settings that torch's logger reports only for "
    "objects of class ProcessGroupGloo, into which it casts; every plugin is 'custom' there",
}
