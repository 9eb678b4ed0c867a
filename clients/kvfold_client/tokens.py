"""Tokens from files: never on a command line, which every process of a host may read."""

import argparse
from pathlib import Path


def token_of_file(path: str) -> str:
    """The first word that is no comment: of a file with a token, or of a worker's token file.

    Raises argparse.ArgumentTypeError, so that it may be an option's `type`.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None
    words = " ".join(line.partition("#")[0] for line in lines).split()
    if not words:
        raise argparse.ArgumentTypeError("has no token")
    return words[0]
