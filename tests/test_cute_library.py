"""Where the `cute` kernels come from: a library that fits is opened, all else is a miss, and the choice is told."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvfold_kernels import backends
from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute import device, library, loading
from kvfold_kernels.compress.cute.variants import ARCHITECTURES, Variant
from tests.cute_cases import built, runtime

__all__ = ["runtime"]

ARCH = "sm_90a"
VARIANT = Variant("append", "hca", "bf16", "bf16")
BYTES = b"\x7fELF, as far as the digest is concerned"


def write(folder: Path, content: bytes = BYTES, **changes: str) -> Path:
    """A library of these bytes with a manifest that fits, but for `changes` of its identity."""
    path = library.path_of(folder, ARCH)
    path.write_bytes(content)
    manifest = {"identity": library.wanted(ARCH) | changes, "sha256": hashlib.sha256(content).hexdigest()}
    library.manifest_of(path).write_text(json.dumps(manifest))
    return path


def never(*_: object) -> None:
    raise AssertionError("a library that does not fit was opened")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else find(name))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """A compiler that writes down what it was asked for."""
    asked: list[Variant] = []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: asked if name == "cutlass" else find(name))
    module = types.ModuleType("compile")
    module.__dict__["compile_variant"] = lambda variant: asked.append(variant) or variant.name
    monkeypatch.setitem(sys.modules, "kvfold_kernels.compress.cute.compile", module)
    monkeypatch.setenv("CUTE_DSL_ARCH", "none")
    return asked


# What does not fit.


def missing(folder: Path) -> str:
    return "there is no kvfold_cute_sm_90a.so"


def without_manifest(folder: Path) -> str:
    library.manifest_of(write(folder)).unlink()
    return "kvfold_cute_sm_90a.json cannot be read (FileNotFoundError)"


def torn_manifest(folder: Path) -> str:
    manifest = library.manifest_of(write(folder))
    manifest.write_text(manifest.read_text()[:-20])
    return "kvfold_cute_sm_90a.json cannot be read (JSONDecodeError)"


def foreign_manifest(folder: Path) -> str:
    library.manifest_of(write(folder)).write_text('{"identity": [], "sha256": ""}')
    return "kvfold_cute_sm_90a.json cannot be read (AttributeError)"


def one_byte(folder: Path) -> str:
    path = write(folder)
    path.write_bytes(BYTES[:9] + bytes([BYTES[9] ^ 1]) + BYTES[10:])
    return "kvfold_cute_sm_90a.so is damaged"


def truncated(folder: Path) -> str:
    path = write(folder)
    path.write_bytes(BYTES[:-1])
    return "kvfold_cute_sm_90a.so is damaged"


def other_sources(folder: Path) -> str:
    write(folder, sources="0123456789abcdef")
    return f"built for sources 0123456789ab, and here it is {library.sources_digest()[:12]}"


def other_compiler(folder: Path) -> str:
    write(folder, cutlass_dsl="4.7.0")
    return "built for cutlass_dsl 4.7.0, and here it is 4.8.1"


def other_machine(folder: Path) -> str:
    write(folder, machine="riscv64")
    return "built for machine riscv64"


def other_ffi(folder: Path) -> str:
    write(folder, tvm_ffi="0.0")
    return "built for tvm_ffi 0.0"


def other_architecture(folder: Path) -> str:
    write(folder, architecture="sm_100a")
    return "built for architecture sm_100a"


MISSES = [
    *(missing, without_manifest, torn_manifest, foreign_manifest, one_byte, truncated),
    *(other_sources, other_compiler, other_machine, other_ffi, other_architecture),
]


@pytest.mark.parametrize("spoil", MISSES)
def test_a_miss_without_a_compiler_says_what_is_missing(spoil, tmp_path, monkeypatch, no_compiler):
    monkeypatch.setattr(library, "open_library", never)
    reason = spoil(tmp_path)
    with pytest.raises(loading.NoKernelsError) as error:
        loading.find(tmp_path, ARCH)
    assert reason in str(error.value)
    assert "run `make kernels`, or pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'" in str(error.value)


@pytest.mark.parametrize("spoil", MISSES)
def test_a_miss_with_a_compiler_compiles_on_first_use(spoil, tmp_path, monkeypatch, compiler):
    monkeypatch.setattr(library, "open_library", never)
    reason = spoil(tmp_path)
    kernels = loading.find(tmp_path, ARCH)
    assert kernels.origin.startswith("kernels compiled now, on first use, because ")
    assert reason in kernels.origin
    assert compiler == []
    assert kernels.get(VARIANT) == VARIANT.name
    assert compiler == [VARIANT]
    assert os.environ["CUTE_DSL_ARCH"] == ARCH


def test_the_sources_are_what_the_key_says(tmp_path, monkeypatch):
    """A byte of a source changes the key; its name and length are in it too."""
    for name in library.SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library.PACKAGE / f"{name}.py", tmp_path / f"{name}.py")
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    digest = library.sources_digest.__wrapped__
    assert digest() == library.sources_digest()
    for name in library.SOURCES:
        source = tmp_path / f"{name}.py"
        text = source.read_bytes()
        source.write_bytes(text + b"\n")
        assert digest() != library.sources_digest()
        source.write_bytes(text)


# What cannot be opened although it fits.


def test_a_file_that_is_no_library_is_a_miss(tmp_path, runtime, compiler):
    """Its digest is right, so it is opened, and the loader refuses it."""
    write(tmp_path)
    assert "kvfold_cute_sm_90a.so cannot be opened: " in loading.find(tmp_path, ARCH).origin


def test_a_missing_runtime_is_a_miss(tmp_path, monkeypatch, compiler):
    shutil.copy(built(ARCH), library.path_of(tmp_path, ARCH))
    shutil.copy(library.manifest_of(built(ARCH)), library.manifest_of(library.path_of(tmp_path, ARCH)))

    def absent() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(library, "cuda_runtime", absent)
    assert "cannot be opened: libcudart.so.13" in loading.find(tmp_path, ARCH).origin


# What fits.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_library_that_fits_is_opened_without_the_compiler(architecture, runtime, no_compiler):
    kernels = loading.find(built(architecture).parent, architecture)
    assert kernels.origin == f"kernels compiled ahead, from {built(architecture)}"
    assert callable(kernels.get(VARIANT))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, runtime) -> Iterator[pytest.MonkeyPatch]:
    """A device of sm_90, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cached = (cute.kernels, cute.kernel, device.architecture, device.max_clusters)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def test_the_backend_says_where_its_kernels_come_from(hopper, runtime, no_compiler, caplog):
    runtime.answer(15)
    with caplog.at_level(logging.INFO, "kvfold"):
        assert backends.load("cute").name == "cute"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"backend cute: kernels compiled ahead, from {built(ARCH)}; 15 clusters at once"


def test_the_backend_says_why_it_compiles(hopper, runtime, compiler, caplog, tmp_path):
    hopper.setattr(cute, "LIBRARIES", tmp_path)
    runtime.answer(15)
    with caplog.at_level(logging.INFO, "kvfold"):
        backends.load("cute")
    assert "compiled now, on first use, because there is no kvfold_cute_sm_90a.so" in caplog.text


def test_the_backend_says_why_it_cannot_run(hopper, no_compiler, tmp_path):
    hopper.setattr(cute, "LIBRARIES", tmp_path)
    reason = backends.why_not("cute")
    assert reason is not None
    assert reason.startswith("backend cute has no kernels for sm_90a: there is no kvfold_cute_sm_90a.so, and the com")
    device.architecture.cache_clear()
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert backends.why_not("cute") == "backend cute has kernels for sm_90a, sm_100a only"
