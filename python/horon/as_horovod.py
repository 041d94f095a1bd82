"""Runs a Python program that imports horovod with horon in its place, without a change.

    python -m horon.as_horovod train.py --epochs 3
    torchrun --nproc-per-node 4 -m horon.as_horovod train.py
    mpirun -np 4 python -m horon.as_horovod -m package.train

horonrun needs no help. See Note [In Horovod's place] in horon/_as_horovod/__init__.py.
"""

from horon._as_horovod import _program

if __name__ == "__main__":
    _program.become()
