"""cli, completion, doctor: commands are entry points, what cannot run says so, help teaches, shells complete."""

import re
import subprocess
import sys
import types
from importlib.metadata import EntryPoint, entry_points

import pytest
import torch

import kvfold_client
from kvfold_client import cli, completion
from kvfold_kernels import backends
from kvfold_service import doctor

COMMANDS = {point.name: point for point in entry_points(group=cli.GROUP)}


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
    register("serve", "import surely_missing.part\n" + ECHO)
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


def test_a_package_may_be_missing_later(register, capsys):
    """Commands that want to tell their options first import the rest when they run."""
    register("bench", "def run(argv):\n    import surely_missing\n")
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("kvfold bench needs the worker extra (surely_missing is missing)")


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


def test_summaries_are_the_docstrings():
    """They are read from the source, through whatever modules a command comes."""
    for name, point in COMMANDS.items():
        assert cli.summary(point) == (point.load().__doc__ or "").partition("\n")[0] != "", name


def test_help_imports_nothing_heavy():
    code = "import sys; from kvfold_client import cli; cli.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("with examples.\nFalse\n")
    assert "kvfold serve --manifest tiny --weights random:1" in done.stdout


def options_of(name: str) -> set[str]:
    options = completion.read_help(name, "", help_of(name)).options
    return {long for option in options for long in option.names}


def help_of(name: str) -> str:
    return completion._help_of(cli.load(COMMANDS[name]))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_by_examples_that_exist(name):
    page = help_of(name)
    examples = re.split(r"\n *examples?\b", page)[1]
    lines = [line.strip() for line in examples.splitlines() if re.match(r" *(example: +)?[A-Z_0-9=]*\s?kvfold ", line)]
    lines += re.findall(r":? +(kvfold version)", examples) if name == "version" else []
    assert any(f"kvfold {name}" in line for line in lines), page
    for part in (part for line in lines for part in re.split(r"[;|>()]| -- ", line)):
        words = part.split()
        if "kvfold" in words:
            command = words[words.index("kvfold") + 1]
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert used <= options_of(command), part


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    typed = " ".join(f"'{word}'" for word in words)
    program = f"{script}\ncompopt() {{ :; }}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kvfold\n"
    program += 'printf "%s\\n" "${COMPREPLY[@]}"\ncomplete -p kvfold\n'
    done = subprocess.run(["bash", "--norc", "-eu", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    *offered, registered = done.stdout.splitlines()
    assert registered == "complete -F _kvfold kvfold"
    return [word for word in offered if word]


def test_bash_completes(capsys, tmp_path, monkeypatch):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(complete(script, "kvfold", "")) == {*COMMANDS, "--help", "--version"}
    assert complete(script, "kvfold", "lo") == ["loadtest"]
    assert complete(script, "kvfold", "loadtest", "--prof") == ["--profile"]
    assert complete(script, "kvfold", "loadtest", "--profile", "") == ["decode", "prefill", "mixed", "speculative"]
    assert complete(script, "kvfold", "loadtest", "--profile", "p") == ["prefill"]
    assert complete(script, "kvfold", "loadtest", "--rate", "") == []
    assert complete(script, "kvfold", "serve", "--log-format", "j") == ["json"]
    assert complete(script, "kvfold", "completion", "") == ["bash", "zsh", "fish", "--help"]
    assert {"--insecure", "--no-insecure", "--manifest"} <= set(complete(script, "kvfold", "serve", "--"))
    (tmp_path / "a trace.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert complete(script, "kvfold", "loadtest", "--trace", "a") == ["a trace.jsonl"]
    assert complete(script, "kvfold", "no-such-command", "") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_of_every_option(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        for option in options_of(name):
            assert re.search(rf"\b{name}\b.*{option.removeprefix('--')}\b", script), (name, option)
    assert "decode prefill mixed speculative" in script


def test_options_are_read_from_help():
    page = """usage: kvfold x [-h] [--a {p,q}]

positional arguments:
  {left,right}  where

options:
  -h, --help            show this help message and exit
  --a {p,q}, -a {p,q}   one of two
  --file FILE
                        a file
  --flag, --no-flag     yes or no
  --rate R,…            numbers

examples
  kvfold x --not-an-option
"""
    found = completion.read_help("x", "does", page)
    assert found.words == ("left", "right")
    assert [(option.names, option.takes_value, option.choices, option.takes_path) for option in found.options] == [
        (("--help",), False, (), False),
        (("--a",), True, ("p", "q"), False),
        (("--file",), True, (), True),
        (("--flag", "--no-flag"), False, (), False),
        (("--rate",), True, (), False),
    ]


def told(capsys) -> tuple[int, list[str]]:
    """Exit status, and the advice of the doctor."""
    status = doctor.run([])
    lines = capsys.readouterr().out.splitlines()
    return status, [line.removeprefix("  - ") for line in lines[lines.index("advice") + 1 :]]


def test_the_doctor_ends_in_what_to_try(capsys):
    status, advice = told(capsys)
    assert status == 0
    assert "backend cpu: kvfold serve --manifest tiny --weights random:1" in advice[-2]
    assert advice[-1] == "then, beside it: kvfold loadtest http://127.0.0.1:8787"


def test_the_doctor_needs_no_torch(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_has", lambda package: False)
    status, advice = told(capsys)
    assert status == 1
    assert advice == [
        "install what a worker needs: pip install 'kvfold[worker]'; for a GPU 'kvfold[cuda]' or 'kvfold[rocm]'"
    ]


def test_the_doctor_sees_a_driver_that_torch_does_not_use(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path)
    status, advice = told(capsys)
    assert status == 0
    assert advice[0].startswith(f"this machine has a driver for NVIDIA GPUs, but torch {torch.__version__} sees none")


def test_the_doctor_sees_a_gpu_without_kernels(capsys, monkeypatch):
    gpu = types.SimpleNamespace(name="Some GPU", total_memory=64 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    monkeypatch.setattr(backends, "why_not", lambda name: None if name in ("cpu", "reference") else f"no {name}")
    status = doctor.run([])
    out = capsys.readouterr().out
    assert status == 0
    assert "  GPU 0: Some GPU, 64 GiB" in out
    assert "there is a GPU, and no kernels for it: pip install 'kvfold[cuda]'" in out


def test_the_doctor_without_any_backend(capsys, monkeypatch):
    monkeypatch.setattr(backends, "why_not", lambda name: f"no {name}")
    status, advice = told(capsys)
    assert status == 1
    assert advice == ["no backend can run by itself: pip install 'kvfold[worker]' brings the one for CPUs"]
