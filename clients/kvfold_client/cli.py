"""`kvfold COMMAND …`: the commands are entry points of the group kvfold.commands, each `run(argv) -> exit status`."""

import argparse
import ast
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from . import __version__

GROUP = "kvfold.commands"
_EXTRA = {"transformers": "demo", "ray": "ray", "nixl": "nixl", "opentelemetry": "otel", "matplotlib": "load"}
"""Package → the extra that brings it; `worker` brings the others."""
_FIRST_STEPS = """
first steps
  kvfold doctor                                        what this machine can run, and what to do next
  kvfold demo                                          a small model through a real worker, compared
  kvfold serve --manifest tiny --weights random:1      a worker, on http://127.0.0.1:8787
  kvfold loadtest http://127.0.0.1:8787                what that worker can do
  source <(kvfold completion bash)                     completes commands and options with Tab

kvfold COMMAND --help says more, with examples.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names. 2: there is no such command, or it lacks what it needs."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(commands), end="")
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        return version(rest)
    if name not in commands:
        return _refuse(f"kvfold has no command {name!r}; it has {', '.join(sorted(commands))}")
    try:
        with _translated(name):
            return commands[name].load()(rest)
    except MissingPackage as error:
        return _refuse(str(error))


def version(argv: list[str]) -> int:
    """Print the version."""
    epilog = "example:  kvfold version"
    argparse.ArgumentParser(prog="kvfold version", description=version.__doc__, epilog=epilog).parse_args(argv)
    print(f"kvfold {__version__}")
    return 0


class MissingPackage(Exception):  # noqa: N818
    """A command cannot be imported, since an optional package is not installed."""

    def __init__(self, command: str, package: str) -> None:
        extra = _EXTRA.get(package, "worker")
        super().__init__(
            f"kvfold {command} needs the {extra} extra ({package} is missing): pip install 'kvfold[{extra}]'"
        )


def load(point: EntryPoint) -> Callable[[list[str]], int]:
    """The command. Raises MissingPackage."""
    with _translated(point.name):
        return point.load()


@contextlib.contextmanager
def _translated(command: str) -> Iterator[None]:
    """A package that is not there → MissingPackage, whether the command wants it at once or when it runs."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("kvfold_"):
            raise  # our own mistake
        raise MissingPackage(command, package) from error


def _help(commands: dict[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:{width}}  {summary(commands[name])}\n" for name in sorted(commands)]
    return "".join(["usage: kvfold COMMAND ...\n\ncommands:\n", *lines, _FIRST_STEPS])


def summary(point: EntryPoint) -> str:
    """The first line of a command's docstring, or why it cannot run. Read from its source: imports take seconds."""
    defined = _defined(point.module, point.attr)
    if defined is None:
        return ""
    tree, function = defined
    for package in _imported(tree):
        if importlib.util.find_spec(package) is None:
            return f"({MissingPackage(point.name, package)})"
    return (ast.get_docstring(function) or "").partition("\n")[0]


def _defined(module: str, name: str) -> tuple[ast.Module, ast.FunctionDef] | None:
    """The source that defines a function, followed from one module to the next."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return tree, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            package = module if spec.submodule_search_locations else module.rpartition(".")[0]
            relative = "." * node.level + (node.module or "")
            return _defined(importlib.util.resolve_name(relative, package), name)
    return None


def _imported(tree: ast.Module) -> list[str]:
    """Top names of what a module imports as soon as it is loaded."""
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name.partition(".")[0] for name in names]


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
