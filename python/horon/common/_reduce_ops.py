"""The reduce ops' numbers: Horovod's, and the engine's."""

from __future__ import annotations

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
