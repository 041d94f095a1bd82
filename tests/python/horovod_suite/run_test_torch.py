"""Runs Horovod's own test/parallel/test_torch.py on horon, which stands in Horovod's place.

    python run_test_torch.py HOROVOD_CHECKOUT [--ranks 2] [--hosts 1] [pytest arguments]

HOROVOD_CHECKOUT is a clone of Horovod's repository: its packages do not ship the tests. They are changed in a copy:

- those over all of torch.optim leave out Muon, which is newer than they are, and which torch itself does not let be
  made for their models, since these have 1-D parameters;
- their helpers import a part of horovodrun that they do not use.

With ``--hosts 2``, every second rank counts as one of another host. Exit status 1 if a test failed on any rank.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

NO_MUON = (
    "subclass != torch.optim.LBFGS and",
    'subclass != torch.optim.LBFGS and subclass != getattr(torch.optim, "Muon", None) and',
)
NO_LAUNCHER = ("from horovod.runner.util.threads import in_thread", "in_thread = None")


def replace(path: Path, *changes: tuple[str, str]) -> None:
    """Changes a file; SystemExit where there is nothing to change, because it is another file than this is made for."""
    text = path.read_text()
    for old, new in changes:
        if old not in text:
            sys.exit(f"{path} has no '{old}': is this Horovod 0.28?")
        text = text.replace(old, new)
    path.write_text(text)


def prepare(checkout: Path, folder: Path) -> Path:
    """Copies Horovod's tests and changes the copy. Returns the test file."""
    shutil.copytree(checkout / "test", folder / "test")
    test_file = folder / "test" / "parallel" / "test_torch.py"
    replace(test_file, NO_MUON)
    replace(folder / "test" / "utils" / "common.py", NO_LAUNCHER)
    return test_file


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, ranks: int, hosts: int, port: int) -> dict[str, str]:
    """What tells one rank its place."""
    places = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {
        **os.environ,
        **{f"HOROVOD_{name}": str(value) for name, value in places.items()},
        "HORON_HOST_ID": f"host{rank % hosts}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of Horovod's repository")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--hosts", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for all tests; default: %(default)s")
    arguments, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        test_file = prepare(arguments.checkout, Path(folder))
        port = free_port()
        command = [sys.executable, "-m", "horon.as_horovod", "-m", "pytest"]
        command += ["-q", "-p", "no:cacheprovider", "--disable-warnings", str(test_file)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(arguments.ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        command + pytest_arguments,
                        cwd=test_file.parent,
                        env=environment(rank, arguments.ranks, arguments.hosts, port),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            codes = [process.wait(arguments.timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        texts = [log.read_text() for log in logs]
        if any(codes):
            print(next(text for text, code in zip(texts, codes, strict=True) if code))
        for rank, text in enumerate(texts):
            summary = re.findall(r"^.*\d+ (?:passed|failed).*$", text, re.MULTILINE)
            print(f"rank {rank}: {summary[-1] if summary else f'exit status {codes[rank]}'}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
