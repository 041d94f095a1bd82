"""Programs that import horovod, and get horon without a change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

# Horovod first, as some scripts have it: torch's entry points have not run yet.
SCRIPT = """
import horovod.torch as hvd
import importlib.metadata, importlib.util, pickle, sys
import torch, horovod, horon.torch, horon.common.exceptions
import horovod.torch.mpi_ops, horovod.common.util, horovod.torch.compression, horovod.data
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import TorchState, run

assert hvd is horon.torch and hvd.__name__ == hvd.__spec__.name == "horon.torch"
assert horovod.torch.elastic is hvd.elastic and horovod.run is horon.run
assert HorovodInternalError is horon.common.exceptions.HorovodInternalError
assert pickle.loads(b"chorovod.torch.compression\\nCompression\\n.") is hvd.Compression
assert importlib.metadata.version("horovod") == horovod.__version__ == "0.28.1"
assert importlib.util.find_spec("horovod.tensorflow") is None
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    assert error.name == "horovod.tensorflow"
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
sys.stdout.write(f"arguments {' '.join(sys.argv[1:])} size {hvd.size()}\\n")  # in one piece
"""
WHICH = "import horovod; print('from', horovod.__version__)"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """Where a Horovod of the user's is."""
    package = tmp_path / "installed" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'its own'\n")
    return str(package.parent)


def start(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python with arguments, until it ends."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


def ranks(*command: str, cwd: Path, number: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    launch = ("-m", "horon.runner.launch", "-np", str(number), sys.executable)
    return start(*launch, *command, cwd=cwd, **variables)


def test_horonrun(program: Path, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()  # as in a clone of Horovod's repository
    (tmp_path / "horovod" / "__init__.py").touch()
    result = ranks(str(program), "--lr", "1", cwd=tmp_path, number=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("arguments --lr 1 size 2") == 2


@pytest.mark.parametrize("way", ["file", "module"])
def test_other_launchers(program: Path, way: str) -> None:
    given = [str(program)] if way == "file" else ["-m", "train"]
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "horon.as_horovod")
    cwd = program.parent if way == "module" else program.parents[1]
    result = start(*launch, *given, "--lr", "1", cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("arguments --lr 1 size 2") == 2


def test_variable(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    result = start("-c", f"import torch; {WHICH}; {child}", WHICH, cwd=tmp_path, HORON_AS_HOROVOD="on")
    assert result.stdout == "from 0.28.1\n" * 2, result.stderr


@pytest.mark.parametrize("word, expected", [("on", "0.28.1"), ("", "its own"), ("off", "its own")])
def test_with_a_horovod(installed: str, tmp_path: Path, word: str, expected: str) -> None:
    result = ranks("-c", WHICH, cwd=tmp_path, PYTHONPATH=installed, HORON_AS_HOROVOD=word)
    assert result.stdout == f"from {expected}\n", result.stderr


def test_off(tmp_path: Path) -> None:
    result = ranks("-c", WHICH, cwd=tmp_path, HORON_AS_HOROVOD="off")
    assert result.returncode != 0
    assert "No module named 'horovod'" in result.stderr


def test_wrong_word(tmp_path: Path) -> None:
    for result in (
        ranks("-c", WHICH, cwd=tmp_path, HORON_AS_HOROVOD="maybe"),
        start("-c", f"import torch; {WHICH}", cwd=tmp_path, HORON_AS_HOROVOD="maybe"),
    ):
        assert result.returncode != 0
        assert "HORON_AS_HOROVOD: expected on or off, got 'maybe'" in result.stderr
    assert start("-c", "import torch", cwd=tmp_path, HORON_AS_HOROVOD="maybe").stderr == ""


def test_as_python_does(tmp_path: Path) -> None:
    """What a program sees of itself is what it sees under `python program`."""
    (tmp_path / "here.py").write_text("value = 1\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "program.py"
    script.write_text("""
import atexit, multiprocessing, os, pickle, sys, here
class Own: pass
def look():
    assert pickle.loads(pickle.dumps(Own())).__class__ is Own  # after the last line, too
    assert sys.modules["__main__"].Own is Own
def double(x):
    return 2 * x
if __name__ == "__main__":
    atexit.register(look)
    print(sys.argv, sys.path[0], __file__, __spec__, __package__, sorted(vars()))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
""")
    arguments = ["scripts/program.py", "--", "-m", "x"]
    plain = start(*arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    ours = start("-m", "horon.as_horovod", *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
    assert ours.stderr == plain.stderr == ""


def test_modules_as_programs(tmp_path: Path) -> None:
    for launch in (["-m", "horon.runner.launch", "-np", "1", sys.executable], ["-m", "horon.as_horovod"]):
        result = start(*launch, "-m", "horovod.runner.launch", "--version", cwd=tmp_path)
        assert result.returncode == 0 and result.stdout, result.stderr
    look = "import inspect, horovod.torch.functions as f; assert 'def broadcast' in inspect.getsource(f)"
    assert ranks("-c", look, cwd=tmp_path).returncode == 0


def test_no_such_program(tmp_path: Path) -> None:
    result = start("-m", "horon.as_horovod", "nothere.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "there is no nothere.py" in result.stderr


def test_function_on_ranks(tmp_path: Path) -> None:
    call = """
import horon

def size():
    import horovod.torch as hvd

    hvd.init()
    return hvd.size()

if __name__ == "__main__":
    print(horon.run(size, num_proc=2))
"""
    (tmp_path / "call.py").write_text(call)
    result = start("call.py", cwd=tmp_path)
    assert result.stdout == "[2, 2]\n", result.stderr
