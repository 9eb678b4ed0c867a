"""What an installed kvfold looks like: three packages and no generic name, arrows between them as drawn, no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[1]
SOURCES = {
    "kvfold_client": ROOT / "clients/kvfold_client",
    "kvfold_kernels": ROOT / "kernels/kvfold_kernels",
    "kvfold_service": ROOT / "service/kvfold_service",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was installed into, without what it depends on."""
    built, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel = built / build_wheel(str(built))
    zipfile.ZipFile(wheel).extractall(target)
    return target


def run_isolated(code: str, site: Path) -> str:
    """Run code with the installed wheel in front of the path."""
    prefix = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    done = subprocess.run([sys.executable, "-I", "-c", prefix + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_three_packages_and_no_generic_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(SOURCES)
    assert all((installed / package / "py.typed").is_file() for package in SOURCES)


def test_every_module_is_in_the_wheel(installed: Path) -> None:
    for package, source in SOURCES.items():
        for module in source.rglob("*.py"):
            assert (installed / package / module.relative_to(source)).is_file()


def test_the_installed_client_needs_no_torch(installed: Path) -> None:
    code = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "fastapi", "pydantic", "numba"):
            raise ModuleNotFoundError(f"no {name} here", name=name)
sys.meta_path.insert(0, Refuse())
import kvfold_client, kvfold_client.cli
from kvfold_client import AsyncClient, Client
print(kvfold_client.__file__)
print(kvfold_client.cli.main(["version"]), kvfold_client.cli.main(["serve"]))
"""
    output = run_isolated(code, installed).split("\n")
    assert output[0].startswith(str(installed))
    assert output[1].startswith("kvfold ")
    assert output[2] == "0 2"


def imports(path: Path) -> set[str]:
    """Modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("kvfold_")}


def allowed(package: str, path: Path, name: str) -> bool:
    if name.startswith(package):
        return True
    if package != "kvfold_service":
        return False
    if name.startswith("kvfold_kernels") or name in ("kvfold_client", "kvfold_client.wire"):
        return True
    return name.startswith("kvfold_client.wire.") or "demo" in path.parts  # the demo is a client of a worker


@pytest.mark.parametrize("package", SOURCES)
def test_import_arrows(package: str) -> None:
    for path in SOURCES[package].rglob("*.py"):
        wrong = {name for name in imports(path) if not allowed(package, path, name)}
        assert not wrong, f"{path.name} imports {wrong}"


def test_geometry_imports_the_standard_library_only() -> None:
    tree = ast.parse((SOURCES["kvfold_kernels"] / "geometry.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in names if name} <= set(sys.stdlib_module_names)
