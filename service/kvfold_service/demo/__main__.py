"""`python -m kvfold_service.demo`."""

import sys

from kvfold_service.demo.command import run

sys.exit(run(sys.argv[1:]))
