"""The peers file: which workers are one fleet. Clients find workers by it, and workers take requests from no one else.

One worker a line, `NAME URL [ROLE]`; # starts a comment. UTF-8.

    prefill-0   http://10.0.0.1:8787   prefill
    decode-0    http://10.0.0.2:8787   decode      # a role is prefill, decode or any (if absent)
"""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

ROLES = ("prefill", "decode", "any")
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")


class PeersError(ValueError):
    """The file is none; str() says which line, and what belongs there."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    url: str
    """http://HOST:PORT or https://HOST:PORT, nothing behind."""
    role: str


def parse_peers(text: str) -> dict[str, Peer]:
    """By name, in the order of the lines; possibly none. Raises PeersError."""
    peers: dict[str, Peer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        peer = _peer(number, words)
        if peer.name in peers or any(peer.url == other.url for other in peers.values()):
            raise PeersError(f"line {number} repeats a name or an address")
        peers[peer.name] = peer
    return peers


def _peer(number: int, words: list[str]) -> Peer:
    if len(words) not in (2, 3) or not _NAME.fullmatch(words[0]) or words[2:] not in ([], *([r] for r in ROLES)):
        raise PeersError(f"line {number} must be: NAME URL [{'|'.join(ROLES)}]")
    return Peer(words[0], _address(number, words[1]), words[2] if len(words) > 2 else "any")


def _address(number: int, url: str) -> str:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        right = False
    else:
        right = right and "@" not in parts.netloc and not parts.path.strip("/") and not parts.query
    if not right:
        raise PeersError(f"line {number}: an address is http://HOST:PORT or https://HOST:PORT, not {url[:100]}")
    return url.rstrip("/")
