"""Who may call: bearer tokens, their tenants, roles and quotas.

A token file has one token a line, `TOKEN TENANT ROLE[,ROLE…] [QUOTA=NUMBER…]`; # starts a comment. Several tokens of
one tenant may be active at a time. A tenant's name comes from its token, never from a request.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvfold_service import quotas
from kvfold_service.errors import ServiceError, StartError
from kvfold_service.quotas import Quota
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
    """Bearer tokens of a file or of `text`, or none: then every caller is trusted. `quotas` by tenant."""

    def __init__(self, path: Path | None, text: str | None = None) -> None:
        self._callers: list[tuple[bytes, Caller]] | None = None
        self.quotas: dict[str, Quota] = {}
        source = "KVFOLD_TOKENS" if path is None else f"--token-file {path.name}"
        try:
            if path is not None:
                text = _text_of(path)
            if text is not None:
                self._read(text)
        except _LineError as error:
            raise StartError(f"{source}{error}") from None

    @property
    def secrets(self) -> list[str]:
        """What no log may show."""
        return [token.decode() for token, _ in self._callers or ()]

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

    def _read(self, text: str) -> None:
        rows = [(number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
        rows = [(number, words) for number, words in rows if words]
        self._callers = [_parse(number, words) for number, words in rows]
        if not rows:
            raise _LineError(" holds no token")
        lines_of: dict[str, int] = {}
        given: dict[str, dict[str, int]] = {}
        for number, words in rows:
            if (first := lines_of.setdefault(words[0], number)) != number:
                raise _LineError(f" line {number} repeats the token of line {first}")
            own = given.setdefault(words[1], {})
            for name, limit in _quotas(number, words[3:]).items():
                if own.setdefault(name, limit) != limit:
                    raise _LineError(f" line {number} gives tenant {words[1]} another quota of {name} than before")
        self.quotas = {tenant: Quota(**own) for tenant, own in given.items() if own}


class _LineError(Exception):
    """What is wrong with the lines, behind the name of where they stand."""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _LineError(f" cannot be read: {type(error).__name__}") from None


def _parse(number: int, words: list[str]) -> tuple[bytes, Caller]:
    if len(words) < 3 or not ID.fullmatch(words[1]) or len(words[0]) < 16:
        raise _LineError(f" line {number} must be: TOKEN (16 characters or more) TENANT ROLE[,ROLE] [QUOTA=NUMBER]")
    roles = frozenset(words[2].split(","))
    if not roles <= set(ROLES):
        raise _LineError(f" line {number}: roles are {', '.join(ROLES)}")
    return words[0].encode(), Caller(words[1], roles)


def _quotas(number: int, words: list[str]) -> dict[str, int]:
    try:
        return quotas.parse(words)
    except ValueError as error:
        raise _LineError(f" line {number}: {error}") from None
