"""`python -m tests.bench.unmerged …`: `kvfold serve` that runs every step alone, to see what batching gains."""

from __future__ import annotations

import sys

from kvfold_service import execute, serve

if __name__ == "__main__":
    execute.can_join = lambda worker, batch, other: False
    sys.exit(serve.run(sys.argv[1:]))
