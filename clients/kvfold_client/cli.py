"""`kvfold COMMAND …`: the commands are entry points of the group kvfold.commands, each `run(argv) -> exit status`."""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from . import __version__

GROUP = "kvfold.commands"


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
        run = _load(commands[name])
    except MissingPackage as error:
        return _refuse(str(error))
    return run(rest)


def version(argv: list[str]) -> int:
    """Print the version."""
    argparse.ArgumentParser(prog="kvfold version", description=version.__doc__).parse_args(argv)
    print(f"kvfold {__version__}")
    return 0


class MissingPackage(Exception):  # noqa: N818
    """A command cannot be imported, since an optional package is not installed."""


def _load(point: EntryPoint) -> Callable[[list[str]], int]:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("kvfold_"):
            raise  # our own mistake
        extra = "demo" if package == "transformers" else "worker"
        raise MissingPackage(
            f"kvfold {point.name} needs the {extra} extra ({package} is missing): pip install 'kvfold[{extra}]'"
        ) from error


def _help(commands: dict[str, EntryPoint]) -> str:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:{width}}  {_summary(commands[name])}\n" for name in sorted(commands)]
    return "".join(["usage: kvfold COMMAND ...\n\ncommands:\n", *lines, "\nkvfold COMMAND --help says more.\n"])


def _summary(point: EntryPoint) -> str:
    try:
        return (_load(point).__doc__ or "").strip().partition("\n")[0]
    except MissingPackage as error:
        return f"({error})"


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
