"""`python -m kvfold_service` is `kvfold serve`."""

import sys

from kvfold_service.serve import run

sys.exit(run(sys.argv[1:]))
