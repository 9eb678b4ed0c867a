"""Launch times of one compressor's part of a step, measured on one H200, and what lies between the measured points.

µs, fp32 rows, backend `triton` (hca, csa), `cute` (indexer: the only one measured). A test compares every number with
the raw results, tests/gpu/results/triton_all.json and cute_csa.json.

    appended   no window closes and the compress launch is left out: by rows of the step (one a request)
    idle       no window closes and the launch stays, as under a full graph that branches on nothing
    closed     by windows that close; hca prompts in two stages
    single     the same in one pass: hca prompts before the split
    eager      without graphs, where the host's part bounds a small step: (appended, idle, closed)
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight lines between measured points; the first value before them, the last slope behind them."""

    at: tuple[float, ...]
    us: tuple[float, ...]

    def __call__(self, x: float) -> float:
        if x <= self.at[-1]:
            return float(np.interp(x, self.at, self.us))
        slope = (self.us[-1] - self.us[-2]) / (self.at[-1] - self.at[-2])
        return self.us[-1] + max(slope, 0.0) * (x - self.at[-1])


@dataclass(frozen=True, slots=True)
class KindLaunches:
    appended: Curve
    idle: Curve
    closed: Curve
    single: Curve | None
    """None: one pass is all there is."""
    eager_us: tuple[float, float, float]


_ROWS = (1, 32, 256)

MEASURED = {
    "hca": KindLaunches(
        appended=Curve(_ROWS, (0.742, 0.787, 0.945)),
        idle=Curve(_ROWS, (1.672, 2.027, 4.700)),
        closed=Curve((1, 8, 32, 64, 256, 512), (2.951, 3.807, 6.262, 9.401, 36.945, 66.829)),
        single=Curve((8, 64, 512), (13.309, 21.458, 74.650)),
        eager_us=(4.688, 33.248, 27.504),
    ),
    "csa": KindLaunches(
        appended=Curve(_ROWS, (0.778, 0.830, 2.968)),
        idle=Curve(_ROWS, (1.066, 0.893, 1.346)),
        closed=Curve((1, 7, 32, 256, 2048, 16384), (1.800, 2.083, 2.422, 4.029, 18.237, 121.455)),
        single=None,
        eager_us=(5.024, 38.128, 38.128),
    ),
    "indexer": KindLaunches(
        appended=Curve(_ROWS, (0.615, 0.600, 0.794)),
        idle=Curve(_ROWS, (0.615, 0.600, 0.794)),
        closed=Curve((1, 32, 256, 2048, 16384), (1.229, 1.470, 2.640, 3.533, 32.008)),
        single=None,
        eager_us=(5.024, 38.128, 38.128),
    ),
}
"""Not measured, and taken from what is nearest: csa's eager step with its launch left in (one launch too: as closed),
the indexer in eager mode (as csa) and with its launch left in (as without: skipping is worth nothing to it here)."""


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """Time of a step's compressors on the device, from measured launches. `skip` and `split` as in kvfold, or not."""

    skip: bool = True
    """The compress launch is left out where no window closes."""
    split: bool = True
    """hca prompts take two stages."""
    graphs: bool = True
    """Launches are replayed; False: the host launches each."""

    def launch_us(self, kind: str, num_rows: int, num_windows: int) -> float:
        """One compressor's part of one step."""
        measured = MEASURED[kind]
        appended_us, idle_us, closed_us = measured.eager_us
        if num_windows == 0:
            curve, floor_us = (measured.appended, appended_us) if self.skip else (measured.idle, idle_us)
            us = curve(num_rows)
        else:
            us, floor_us = measured.closed(num_windows), closed_us
            if not self.split and measured.single is not None and num_windows >= measured.single.at[0]:
                us = max(us, measured.single(num_windows))
        return us if self.graphs else max(us, floor_us)
