"""`kvfold completion SHELL`: a script that completes commands, options and their values.

What there is to complete is read from each command's own --help, so it cannot differ from it.
"""

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from .cli import GROUP, MissingPackage, load, summary

EXAMPLES = """
examples
  source <(kvfold completion bash)                                       in this shell
  kvfold completion bash > ~/.local/share/bash-completion/completions/kvfold   in every new one
  kvfold completion zsh > "${fpath[1]}/_kvfold"
  kvfold completion fish > ~/.config/fish/completions/kvfold.fish
"""
_PATHS = {"FILE", "DIR", "FOLDER", "Path", "BEFORE", "--manifest", "--weights"}
"""Metavars of options that take a path, and options that may."""
_OPTION = re.compile(r"  (?:-\w(?: \S+)?, )?(--[a-z].*?)(?:  .*)?")
_CHOICES = re.compile(r"\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...] = ()
    takes_path: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str
    options: tuple[Option, ...] = ()
    words: tuple[str, ...] = ()
    """What may stand without an option before it, where that is a choice."""


def run(argv: list[str]) -> int:
    """Print a script that lets a shell complete kvfold's commands and options."""
    parser = argparse.ArgumentParser(
        prog="kvfold completion",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="whose script")
    print(SCRIPTS[parser.parse_args(argv).shell](commands()), end="")
    return 0


def commands() -> list[Command]:
    """All commands; one whose packages are missing has no options to complete."""
    return [_command(point.name, summary(point), point) for point in sorted(entry_points(group=GROUP))]


def _command(name: str, text: str, point: EntryPoint) -> Command:
    try:
        return read_help(name, text, _help_of(load(point)))
    except MissingPackage:
        return Command(name, text)


def _help_of(command: Callable[[list[str]], int]) -> str:
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        command(["--help"])
    return page.getvalue()


def read_help(name: str, text: str, page: str) -> Command:
    """A command, by the page that argparse prints for it."""
    options, words = [], []
    for line in page.splitlines():
        if found := _OPTION.fullmatch(line):
            options.append(_option(found[1]))
        elif line.startswith("  {") and (choices := _CHOICES.match(line.strip())):
            words += choices[1].split(",")
    return Command(name, text, tuple(options), tuple(words))


def _option(invocation: str) -> Option:
    """`--rate R,…`, `--dtype {bf16,fp32}`, `--insecure, --no-insecure`."""
    names = tuple(re.findall(r"--[a-z][a-z0-9-]*", invocation))
    value = re.sub(r"(?:, )?--[a-z][a-z0-9-]*", "", invocation).strip()
    choices = _CHOICES.match(value)
    takes_path = bool(_PATHS & {*names, value.split(" ")[0]})
    return Option(names, bool(value), tuple(choices[1].split(",")) if choices else (), takes_path)


def bash(found: Sequence[Command]) -> str:
    cases = _case_lines(found, "words=", "paths=1")
    return f"""_kvfold() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words="" paths=""
    if ((COMP_CWORD == 1)); then
        words="{_spaced(command.name for command in found)} --help --version"
    else case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{cases}    esac fi
    COMPREPLY=()
    if [[ $paths ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
}}
complete -F _kvfold kvfold
"""


def zsh(found: Sequence[Command]) -> str:
    described = "\n".join(f"        {_quoted(f'{command.name}:{command.summary}')}" for command in found)
    cases = _case_lines(found, "choices=", "_files; return")
    return f"""#compdef kvfold
_kvfold() {{
    local choices=""
    local -a described=(
{described}
    )
    if ((CURRENT == 2)); then
        _describe command described
        return
    fi
    case "$words[2] $words[CURRENT-1]" in
{cases}    esac
    compadd -- ${{=choices}}
}}
if [[ $funcstack[1] == _kvfold ]]; then
    _kvfold "$@"
else
    compdef _kvfold kvfold
fi
"""


def fish(found: Sequence[Command]) -> str:
    lines = ["complete -c kvfold -f"]
    for command in found:
        lines.append(f"complete -c kvfold -n __fish_use_subcommand -a {command.name} -d {_quoted(command.summary)}")
        seen = f"complete -c kvfold -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{seen} -a '{_spaced(command.words)}'")
        for option in command.options:
            lines += [f"{seen} -l {name.removeprefix('--')}{_fish_value(option)}" for name in option.names]
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _case_lines(found: Sequence[Command], words: str, paths: str) -> str:
    return "".join(f"        {patterns}) {action} ;;\n" for patterns, action in _cases(found, words, paths))


def _cases(found: Sequence[Command], words: str, paths: str) -> Iterable[tuple[str, str]]:
    """(patterns of "COMMAND PREVIOUS", what to do), for a `case` of bash or zsh."""
    for command in found:
        actions: dict[str, list[str]] = {}
        for option in command.options:
            if option.takes_value:
                action = paths if option.takes_path else f'{words}"{_spaced(option.choices)}"'
                actions.setdefault(action, []).extend(f'"{command.name} {name}"' for name in option.names)
        yield from (("|".join(patterns), action) for action, patterns in actions.items())
        every = [*command.words, *(name for option in command.options for name in option.names)]
        yield f'"{command.name} "*', f'{words}"{_spaced(every)}"'


def _fish_value(option: Option) -> str:
    if option.takes_path:
        return " -r -F"
    return f" -x -a '{_spaced(option.choices)}'" if option.takes_value else ""


def _spaced(words: Iterable[str]) -> str:
    return " ".join(words)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"
