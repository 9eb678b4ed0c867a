"""cli: commands are found by entry point, and what cannot run says so in one sentence."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import kvfold_client
from kvfold_client import cli


@pytest.fixture
def register(monkeypatch, tmp_path):
    """register(name, source) → a command whose module has this source."""
    points = [EntryPoint("version", "kvfold_client.cli:version", cli.GROUP)]
    monkeypatch.syspath_prepend(tmp_path)

    def entry_points(*, group):
        assert group == "kvfold.commands"
        return points

    def add(name, source):
        (tmp_path / f"command_{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"command_{name}", raising=False)
        points.append(EntryPoint(name, f"command_{name}:run", cli.GROUP))

    monkeypatch.setattr(cli, "entry_points", entry_points)
    return add


ECHO = 'def run(argv):\n    """Say it again.\n\n    Twice.\n    """\n    print(argv)\n    return 7\n'


def test_a_command_gets_its_arguments(register, capsys):
    register("echo", ECHO)
    assert cli.main(["echo", "-h", "--help", "x"]) == 7
    assert capsys.readouterr().out == "['-h', '--help', 'x']\n"


def test_help_lists_commands(register, capsys):
    register("echo", ECHO)
    register("serve", "import surely_missing.part\n")
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  echo     Say it again." in lines
    assert "  version  Print the version." in lines
    assert any(line.startswith("  serve ") and "pip install 'kvfold[worker]'" in line for line in lines)
    assert cli.main([]) == 2


@pytest.mark.parametrize(("missing", "extra"), [("surely_missing.part", "worker"), ("transformers", "demo")])
def test_a_missing_package_is_one_sentence(register, capsys, monkeypatch, missing, extra):
    monkeypatch.setitem(sys.modules, "transformers", None)
    register("serve", f"import {missing}\n")
    assert cli.main(["serve"]) == 2
    captured = capsys.readouterr()
    package = missing.partition(".")[0]
    assert captured.out == ""
    assert captured.err == (
        f"kvfold serve needs the {extra} extra ({package} is missing): pip install 'kvfold[{extra}]'\n"
    )


def test_our_own_mistakes_are_not_hidden(register):
    register("serve", "import kvfold_client.no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["serve"])
    register("bench", "from json import nothing\n")
    with pytest.raises(ImportError, match="nothing"):
        cli.main(["bench"])


def test_an_unknown_command_is_one_sentence(register, capsys):
    register("echo", ECHO)
    assert cli.main(["serv"]) == 2
    assert capsys.readouterr().err == "kvfold has no command 'serv'; it has echo, version\n"


def test_version(capsys):
    for argv in (["version"], ["--version"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out == f"kvfold {kvfold_client.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["version", "--no-such-option"])


def test_installed_commands_exist():
    done = subprocess.run(
        [sys.executable, "-m", "kvfold_client.cli", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvfold {kvfold_client.__version__}\n"


def test_public_names():
    assert sorted(kvfold_client.__all__) == kvfold_client.__all__
    assert all(hasattr(kvfold_client, name) for name in kvfold_client.__all__)
