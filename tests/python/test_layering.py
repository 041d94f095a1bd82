"""csrc never includes torch, so that it compiles in seconds and its tests need none of it; its folders are layers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = re.compile(
    r'^\s*#\s*include\s*[<"]((?:torch|ATen|c10|caffe2|pybind11|torch_backend)/|Python\.h)', re.MULTILINE
)
SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh", ".inc", ".inl"}


def test_pattern_finds_torch() -> None:
    assert FORBIDDEN.search("#include <torch/extension.h>\n")
    assert FORBIDDEN.search('\n #  include "c10/util/Half.h"\n')
    assert not FORBIDDEN.search('#include "core/request.h"\n// #include <torch/extension.h>\n')


def test_csrc_includes_no_torch() -> None:
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in SUFFIXES]
    assert files, "there is nothing under csrc"
    found = [
        f"{path.relative_to(ROOT)}: {match.group(0).strip()}"
        for path in files
        for match in FORBIDDEN.finditer(path.read_text(errors="replace"))
    ]
    assert not found, "\n".join(found)


# Which folders of csrc a folder may include, besides itself: docs/architecture.md, Layers.
MAY_INCLUDE = {
    "core": {"reduce"},
    "reduce": {"core"},
    "cuda": {"core"},
    "net": {"core"},
    "watch": {"core", "net"},
    "shm": {"core", "reduce", "watch"},
    "members": {"core", "shm"},
    "cross": {"core", "net", "reduce", "watch"},
    "p2p": {"core", "cross", "shm", "watch"},
    "named": {"core", "reduce", "watch"},
    "nccl": {"core", "cuda"},
}
BETWEEN_LAYERS = {("nccl/named_batch_plan.h", "named")}


def test_folders_of_csrc_include_only_those_below() -> None:
    csrc = ROOT / "csrc"
    assert {path.name for path in csrc.iterdir() if path.is_dir()} == set(MAY_INCLUDE)
    found = []
    for path in csrc.rglob("*"):
        if path.suffix in SUFFIXES:
            name = path.relative_to(csrc)
            may = MAY_INCLUDE[name.parts[0]] | {name.parts[0]}
            for folder in re.findall(r'^\s*#\s*include\s*"(\w+)/', path.read_text(errors="replace"), re.MULTILINE):
                if folder not in may and (str(name), folder) not in BETWEEN_LAYERS:
                    found.append(f"{name} includes {folder}/")
    assert not found, "\n".join(found)
