"""Upstream tests that pass on Gloo and that horon is not asked to pass, each with its reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {
    "test_sparse_all_reduce_sum": "horon refuses sparse tensors by design",
}
