"""Runs clang-tidy over csrc/ and torch_backend/, with the compile commands of the builds that exist.

    CLANG_TIDY=clang-tidy JOBS=2 python scripts/clang_tidy.py [file.cc ...]

The engine's commands come from build/tests (make test-cpp), the extension's from the newest build/*/cmake that setup.py
made, without their precompiled header, which is GCC's. Where a build compiles many files as one (HORON_UNITY), they are
checked as one, which takes a fifth of the time: most of it goes into headers. Files that are named on the command line
are checked by themselves; that also shows which of them include too little. Files without a command are an error: a
file nobody compiles is one nobody checks. Those that include CUDA's or NCCL's headers are left out, and named, where no
build has the GPU parts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATABASE = ROOT / "build/clang-tidy/compile_commands.json"
FOLDERS = ("csrc", "torch_backend")
INCLUDED_SOURCE = re.compile(r'^#include "(.*\.cc)"$', re.MULTILINE)
NEEDS_CUDA = re.compile(r'^#include [<"](cuda_runtime|nccl\.h|cuda/cuda_error\.h)', re.MULTILINE)


def databases() -> list[Path]:
    """Every compile_commands.json, in the order in which they are asked."""
    extension_builds = sorted(
        ROOT.glob("build/*/cmake/compile_commands.json"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    found = [ROOT / "build/tests/compile_commands.json", *extension_builds]
    return [path for path in found if path.exists()]


def without_precompiled_header(command: str) -> list[str]:
    """The words of a compiler's command, less those with which CMake includes a precompiled header."""
    words = shlex.split(command)
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] == "-include" and "/cmake_pch." in word:
            kept.pop()
        elif word != "-Winvalid-pch":
            kept.append(word)
    return kept


def included_sources(file: Path) -> list[Path]:
    """What a unity build compiles as this file; nothing of other files."""
    is_unity = file.parent.name == "Unity" and file.exists()
    return [Path(name).resolve() for name in INCLUDED_SOURCE.findall(file.read_text())] if is_unity else []


def compiled_as() -> tuple[dict[Path, Path], list[dict[str, Any]]]:
    """For each source, the file that the first database which has it compiles; and a command for each of both."""
    result: dict[Path, Path] = {}
    commands: dict[Path, dict[str, Any]] = {}
    for database in databases():
        for entry in json.loads(database.read_text()):
            file = Path(entry["directory"], entry["file"]).resolve()
            words = without_precompiled_header(entry["command"])
            for source in [file, *included_sources(file)]:
                arguments = [
                    str(source) if Path(entry["directory"], word).resolve() == file else word for word in words
                ]
                command = {"directory": entry["directory"], "file": str(source), "arguments": arguments}
                commands.setdefault(source, command)
                result.setdefault(source, file)
    return result, list(commands.values())


def check(clang_tidy: list[str], file: Path) -> bool:
    """Runs clang-tidy on one file; prints its findings, and says whether there were none."""
    command = [*clang_tidy, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", "-p", str(DATABASE.parent), str(file)]
    if included_sources(file):
        command.append("--checks=-bugprone-suspicious-include")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0


def main() -> int:
    clang_tidy = shlex.split(os.environ.get("CLANG_TIDY", "clang-tidy"))
    if shutil.which(clang_tidy[0]) is None:
        print(f"missing: {clang_tidy[0]}. Use:  pip install clang-tidy")
        return 1
    wanted = [Path(name).resolve() for name in sys.argv[1:]]
    are_named = bool(wanted)
    if not wanted:
        wanted = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.cc"))
    compiled, commands = compiled_as()
    DATABASE.parent.mkdir(parents=True, exist_ok=True)
    DATABASE.write_text(json.dumps(commands))
    left_out = [file for file in wanted if file not in compiled and NEEDS_CUDA.search(file.read_text())]
    for file in left_out:
        print(f"{file.relative_to(ROOT)}: left out, no build here has the GPU parts")
    wanted = [file for file in wanted if file not in left_out]
    uncompiled = [file for file in wanted if file not in compiled]
    for file in uncompiled:
        print(f"{file.relative_to(ROOT)}: no build compiles it (make test-cpp, pip install .)")
    wanted = [file for file in wanted if file not in uncompiled]
    checked = wanted if are_named else list(dict.fromkeys(compiled[file] for file in wanted))
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        clean = list(pool.map(lambda file: check(clang_tidy, file), checked))
    together = "" if len(checked) == len(wanted) else f", of {len(wanted)} sources"
    print(f"clang-tidy: {clean.count(True)} of {len(checked)} files clean{together}")
    return 0 if all(clean) and not uncompiled else 1


if __name__ == "__main__":
    sys.exit(main())
