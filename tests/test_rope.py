"""The rotation table: YaRN's ramp, fp32 angles, one rounding of cos and sin, the same rows in any table."""

from __future__ import annotations

import math

import numpy as np

from kvfold_kernels.rope import Rope
from tests.cases import rope_table


def test_yarn_ramp_lies_between_frequencies_15_and_25():
    """Up to 15 the plain frequency, from 25 on a sixteenth of it, a straight line between."""
    plain = Rope(yarn=None).inv_freq().astype(np.float64)
    np.testing.assert_allclose(plain, [160000.0 ** -(i / 32) for i in range(32)], rtol=1e-6)
    keep = np.array([1 - min(max((i - 15) / 10, 0), 1) for i in range(32)])
    np.testing.assert_allclose(Rope().inv_freq(), plain * (keep + (1 - keep) / 16), rtol=3e-7)
    np.testing.assert_array_equal(Rope().inv_freq()[:16], plain[:16].astype(np.float32))


def test_a_row_is_cos_then_sin_of_the_fp32_angle():
    inv_freq = Rope().inv_freq()
    table = rope_table().numpy()
    assert (table.shape, table.dtype) == ((8192, 64), np.float32)
    for position in (0, 1, 127, 4096, 8191):
        for i, frequency in enumerate(inv_freq):
            angle = float(np.float32(position) * frequency)
            assert table[position, i] == np.float32(math.cos(angle))
            assert table[position, 32 + i] == np.float32(math.sin(angle))


def test_rows_do_not_depend_on_the_table_s_length():
    longer = Rope().table(65_540)  # past the blocks that a table is made in
    np.testing.assert_array_equal(longer[:8192], rope_table().numpy())
    angle = (np.arange(65_530, 65_540, dtype=np.float32)[:, None] * Rope().inv_freq()).astype(np.float64)
    np.testing.assert_array_equal(longer[65_530:], np.concatenate((np.cos(angle), np.sin(angle)), 1).astype(np.float32))
