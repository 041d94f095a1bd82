"""Types of the extension (torch_backend/bindings.cc)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
