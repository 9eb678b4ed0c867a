"""`kvfold bench`: every backend of this machine on the same steps, beside what the memory could do.

`cases` are the steps, a `problem` is one of them in memory. `check` compares a backend with the definition, `timing`
times backends in turns, `copying` measures the memory; `plans` times the plan. `measured` makes a result of all this,
`tables` shows it, `compare` says what differs between two of them.
"""

from kvfold_kernels.bench.command import run

__all__ = ["run"]
"""The command is `run`."""
