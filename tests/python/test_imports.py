"""Every public module can be the first thing that a program imports: import sorters put horon before torch."""

import pathlib
import subprocess
import sys

import horon
import pytest

kPackage = pathlib.Path(horon.__file__).parent


def public_modules() -> list[str]:
    """The modules without a leading underscore, by their dotted names; and where the package's names come from."""
    names = []
    for path in sorted(kPackage.rglob("*.py")):
        parts = path.relative_to(kPackage.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    is_public = [not any(part.startswith("_") for part in name.split(".")) for name in names]
    return [name for name, public in zip(names, is_public, strict=True) if public] + sorted(
        set(horon._MODULES.values())
    )


@pytest.mark.parametrize("module", public_modules())
def test_can_be_imported_before_torch(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
