"""Types of _build_info.py, which setup.py writes beside the extension."""

TORCH_VERSION: str
PYTHON_TAG: str
BUILD_ID: str
CUDA: bool
