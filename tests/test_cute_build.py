"""Building the `cute` libraries: what is built and when, what the kernels take, and what the wheel carries."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from kvfold_kernels.compress import cute_build
from kvfold_kernels.compress.cute import library
from kvfold_kernels.compress.cute.variants import ARCHITECTURES, all_variants
from tests.cute_cases import built

ARCH = ARCHITECTURES[0]
RESOURCES = Path(__file__).parent / "gpu" / "resources_cute.json"


def test_what_fits_is_not_built_again(monkeypatch, capsys):
    monkeypatch.setattr(cute_build, "build", None)
    monkeypatch.setattr(sys, "argv", ["cute_build"])
    cute_build.main()
    assert capsys.readouterr().out.count("fits these sources, nothing to do") == len(ARCHITECTURES)


def test_what_does_not_fit_is_built_and_only_that(monkeypatch, tmp_path, capsys):
    for architecture in ARCHITECTURES:
        path = library.path_of(tmp_path, architecture)
        shutil.copy(built(architecture), path)
        shutil.copy(library.manifest_of(built(architecture)), library.manifest_of(path))
    with library.path_of(tmp_path, ARCH).open("ab") as file:
        file.write(b"\0")
    calls = []
    monkeypatch.setattr(cute_build, "build", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(cute_build, "_require_compiler", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cute_build", "--out", str(tmp_path), "--jobs", "3"])
    cute_build.main()
    assert calls == [([ARCH], tmp_path, 3)]
    assert "kvfold_cute_sm_90a.so: to be built, kvfold_cute_sm_90a.so is damaged" in capsys.readouterr().out


def test_building_without_the_compiler_says_what_to_install(tmp_path):
    command = [sys.executable, "-m", "kvfold_kernels.compress.cute_build", "--out", str(tmp_path)]
    without = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'cutlass' else f(n)"
    )
    done = subprocess.run(command, env=os.environ | without, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "building needs nvidia-cutlass-dsl[cu13]==4.8.1, and here is none: "
        "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'\n"
    )


def test_the_wheel_carries_the_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    names = zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))).namelist()
    for architecture in ARCHITECTURES:
        for suffix in (".so", ".json"):
            assert f"kvfold_kernels/compress/cute/lib/{built(architecture).with_suffix(suffix).name}" in names


def test_a_library_runs_on_any_processor():
    """The compiler would take this machine's instructions for the host code: none of AVX may be in it."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(built(ARCH))]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "%xmm" in code
    assert "%ymm" not in code
    assert "%zmm" not in code


# What the built kernels take.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources_of_the_built_kernels(architecture):
    """No spills, and no more registers or shared memory than in the committed table.

    Write the table anew: python -m kvfold_kernels.compress.cute_build --table > tests/gpu/resources_cute.json
    """
    found, known = library.read_manifest(built(architecture)), json.loads(RESOURCES.read_text())
    assert (found["identity"]["cutlass_dsl"], found["ptxas"]) == (known["cutlass_dsl"], known["ptxas"])
    assert list(found["kernels"]) == [variant.name for variant in all_variants()] == list(known[architecture])
    for name, taken in found["kernels"].items():
        table = known[architecture][name]
        assert taken["stack_bytes"] == 0, f"{name} spills"
        assert taken["unrounded"] == 0, f"{name} has an operation without a stated rounding"
        assert taken["late_starts"] == 0, f"{name} waits before it lets the next launch start"
        assert taken["registers"] <= table["registers"], f"{name}: {taken}, known {table}"
        assert taken["shared_bytes"] <= table["shared_bytes"], f"{name}: {taken}, known {table}"


def test_every_module_that_makes_a_kernel_is_in_the_key():
    """What `compile` imports, and what that imports."""
    found, open_names = set(), {"compress/cute/compile"}
    while open_names:
        name = open_names.pop()
        found.add(name)
        for node in ast.walk(ast.parse((library.PACKAGE / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvfold_kernels"):
                base = "/".join(node.module.split(".")[1:])
                names = [base, *(f"{base}/{alias.name}".lstrip("/") for alias in node.names)]
                open_names |= {each for each in names if (library.PACKAGE / f"{each}.py").is_file()} - found
    assert found == set(library.SOURCES)
