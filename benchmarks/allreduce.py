"""`collectives.py` for all_reduce alone, under its older name.

python benchmarks/allreduce.py --ranks 2 --against gloo,fake,memcpy --json out.json --plot out.png
"""

import sys

import collectives

if __name__ == "__main__":
    sys.exit(collectives.main("allreduce", "all_reduce"))
