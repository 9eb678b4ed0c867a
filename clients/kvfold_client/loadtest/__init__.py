"""`kvfold loadtest`: steps at a rate of their own against a worker, and what its callers would have waited.

`schedule` (or a trace) says when steps are due, `traffic` sends them then; `load` makes them in the `shape` of a
profile, for `sessions` of requests that `held` remembers and releases. A `sample` is one step, `summary` what all of
them amount to; `perform` is a whole test, and its `sweep` goes through the `points`. `report`, `plots`, `page` and
`record` tell of it.
"""

from .command import run
from .sample import OK, UNFINISHED, Sample
from .schedule import even, poisson
from .summary import percentile, percentiles_ms, summarise
from .traffic import Send, Traffic, precise_loop

__all__ = [
    "OK",
    "UNFINISHED",
    "Sample",
    "Send",
    "Traffic",
    "even",
    "percentile",
    "percentiles_ms",
    "poisson",
    "precise_loop",
    "run",
    "summarise",
]
