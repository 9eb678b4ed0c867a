"""A client in another language, written from the contract alone, against a worker.

tests/node/check.mjs drives the worker and prints the entries it read; here they are
recomputed in float64 from the same rows and compared within the rounding of their format.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvfold_service import manifest, weights

NODE = Path(__file__).parent / "node"
ROPE_DIM = 64
EPS = 1e-6
# name -> ratio, head_dim, whether a window also takes the rows of the one before it
KINDS = {
    "layers.0.hca": (128, 512, False),
    "layers.1.csa": (4, 512, True),
    "layers.1.indexer": (4, 128, True),
}
E4M3_BITS, E4M3_MIN_EXPONENT = 3, -6
BF16_BITS, BF16_MIN_EXPONENT = 7, -126

pytestmark = [
    pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not on PATH") for tool in ("node", "npm")
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """The base URL of a worker of its own."""
    log_path = tmp_path_factory.mktemp("worker") / "stderr.txt"
    command = [sys.executable, "-m", "kvfold_service", "--manifest", "tiny", "--weights", "random:1", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFOLD_")}
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        deadline = threading.Timer(180, process.kill)
        deadline.start()
        try:
            words = process.stdout.readline().split()
            deadline.cancel()
            assert words[:1] == ["ready"], log_path.read_text()
            yield words[1]
        finally:
            deadline.cancel()
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def report(worker, tmp_path_factory):
    """What check.mjs printed."""
    folder = tmp_path_factory.mktemp("client") / "node"
    shutil.copytree(NODE, folder, ignore=shutil.ignore_patterns("node_modules"))
    run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], folder)
    return json.loads(run(["node", "check.mjs", worker], folder))


def run(command, folder):
    executable = shutil.which(command[0])
    done = subprocess.run([executable, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def fmix32(seed, shape):
    h = np.uint32(seed) + np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return ((h >> np.uint32(8)) / 2.0**22 - 2.0).reshape(shape)


def inverse_frequencies(theta=160000.0, factor=16.0, original=65536, beta_fast=32, beta_slow=1):
    pairs = ROPE_DIM // 2
    plain = theta ** (-np.arange(pairs) / pairs)
    low, high = (pairs * math.log(original / (beta * 2 * math.pi)) / math.log(theta) for beta in (beta_fast, beta_slow))
    low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def exact_entry(rows, ape, norm_weight, entry, ratio, dim, overlap):
    """Entry `entry` before it is quantised, in float64."""
    first = entry * ratio
    halves = 2 if overlap else 1
    kv, score = np.split(rows, 2, axis=1)
    score = score + ape[np.arange(len(rows)) % ratio]
    own = (slice(first, first + ratio), slice((halves - 1) * dim, None))
    windows = [own]
    if overlap and entry > 0:
        windows.insert(0, (slice(first - ratio, first), slice(0, dim)))
    kv = np.concatenate([kv[window] for window in windows])
    score = np.concatenate([score[window] for window in windows])

    share = np.exp(score - score.max(axis=0))
    share /= share.sum(axis=0)
    x = (share * kv).sum(axis=0)
    x *= norm_weight / np.sqrt(np.mean(x * x) + EPS)

    angle = first * inverse_frequencies()
    even, odd = x[-ROPE_DIM::2].copy(), x[-ROPE_DIM + 1 :: 2].copy()
    x[-ROPE_DIM::2] = even * np.cos(angle) - odd * np.sin(angle)
    x[-ROPE_DIM + 1 :: 2] = even * np.sin(angle) + odd * np.cos(angle)
    return x


def half_ulp(x, bits, min_exponent):
    exponent = np.frexp(x)[1] - 1
    return np.ldexp(0.5, np.maximum(exponent, min_exponent) - bits)


def block_scale(block):
    """The smallest power of two under which the block, rounded to bf16, fits e4m3."""
    amax = np.abs(block).max()
    step = 2 * half_ulp(amax, BF16_BITS, BF16_MIN_EXPONENT)
    amax = max(np.rint(amax / step) * step, 1e-4)
    return 2.0 ** math.ceil(math.log2(amax / 448))


@pytest.mark.parametrize("name", KINDS)
def test_entry_read_by_another_client(report, name):
    ratio, dim, overlap = KINDS[name]
    given = next(rows for rows in report["rows"] if rows["compressor"] == name)
    assert given["generator"] == "fmix32"
    rows = fmix32(given["seed"], given["shape"])
    tiny = manifest.load("tiny")
    ape, norm_weight = (tensor.double().numpy() for tensor in weights.load("random:1", tiny)[name])
    decoded = report["decoded"][name]
    exact = exact_entry(rows, ape, norm_weight, decoded["entry"], ratio, dim, overlap)

    # fp8_ds_mla: blocks of 64 in e4m3, then the RoPE columns in bf16; indexer_fp8: one block.
    quantised, block = (dim, dim) if name.endswith("indexer") else (dim - ROPE_DIM, 64)
    scales = [block_scale(part) for part in exact[:quantised].reshape(-1, block)]
    assert decoded["scales"] == scales

    scale = np.repeat(scales, block)
    rounding = half_ulp(exact, BF16_BITS, BF16_MIN_EXPONENT)
    rounding[:quantised] += scale * half_ulp(exact[:quantised] / scale, E4M3_BITS, E4M3_MIN_EXPONENT)
    float32_noise = 4e-6 * np.abs(exact).max()
    error = np.abs(np.array(decoded["values"]) - exact)
    worst = np.argmax(error - rounding)
    assert error[worst] <= rounding[worst] + float32_noise, f"column {worst}"
