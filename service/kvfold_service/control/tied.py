"""`python -m kvfold_service.control.tied PARENT …`: `kvfold serve …` that ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kvfold_service import serve

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    parent, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    return serve.run(argv)


if __name__ == "__main__":
    sys.exit(main())
