"""Who may call: bearer tokens, their tenants and roles.

A token file has one token a line, `TOKEN TENANT ROLE[,ROLE…]`; # starts a comment. Several tokens of one tenant may be
active at a time. A tenant's name comes from its token, never from a request.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvfold_service.errors import ServiceError, StartError
from kvfold_service.step import ID

ROLES: Final = ("step", "pull", "admin")
"""step: run steps and change requests · pull: read pages and requests · admin: statistics and checks."""


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    roles: frozenset[str]

    def expect(self, *roles: str) -> None:
        """Raises forbidden unless the caller has one of the roles."""
        if self.roles.isdisjoint(roles):
            raise ServiceError("forbidden", f"this token lacks the role {' or '.join(roles)}")


ANYONE: Final = Caller("", frozenset(ROLES))


class Tokens:
    """Bearer tokens of a file, or none: then every caller is trusted."""

    def __init__(self, path: Path | None) -> None:
        self._callers: list[tuple[bytes, Caller]] | None = None
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise StartError(f"--token-file {path.name} cannot be read: {type(error).__name__}") from None
            rows = [(number, line.split("#")[0].split()) for number, line in enumerate(lines, 1)]
            self._callers = [_parse(path.name, number, words) for number, words in rows if words]
            if not self._callers:
                raise StartError(f"--token-file {path.name} holds no token")
            lines_of: dict[str, int] = {}
            for number, words in rows:
                if words and (first := lines_of.setdefault(words[0], number)) != number:
                    raise StartError(f"--token-file {path.name} line {number} repeats the token of line {first}")

    def caller(self, authorization: str | None) -> Caller:
        """The caller of an Authorization header. Raises unauthorized. Every token is compared, in constant time."""
        if self._callers is None:
            return ANYONE
        scheme, _, given = (authorization or "").partition(" ")
        found = None
        for token, caller in self._callers:
            if hmac.compare_digest(token, given.strip().encode()):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise ServiceError("unauthorized", "send a valid token: Authorization: Bearer …")
        return found


def _parse(file: str, number: int, words: list[str]) -> tuple[bytes, Caller]:
    if len(words) != 3 or not ID.fullmatch(words[1]) or len(words[0]) < 16:
        raise StartError(f"--token-file {file} line {number} must be: TOKEN (16 characters or more) TENANT ROLE[,ROLE]")
    roles = frozenset(words[2].split(","))
    if not roles <= set(ROLES):
        raise StartError(f"--token-file {file} line {number}: roles are {', '.join(ROLES)}")
    return words[0].encode(), Caller(words[1], roles)
