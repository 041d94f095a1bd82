"""What is uploaded to a package index: horon can be built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="not about collectives")

ROOT = Path(__file__).resolve().parents[2]
# Of no use to who builds: what was measured on other machines, and settings of tools (.ci, .clang-tidy).
LEFT_OUT = ("benchmarks/results/", ".")


def test_a_source_distribution_has_every_file(tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("only git knows which files belong to a checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip(listed.stderr)
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for name in tracked:  # setuptools leaves files where it runs
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--formats=tar"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    expected = {name for name in tracked if not name.startswith(LEFT_OUT)}
    assert sorted(expected - packed) == []
    assert not [name for name in packed if name.endswith((".so", ".pyc", "_build_info.py"))]
