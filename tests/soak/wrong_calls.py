"""What a soak client does that must be refused, and changes nothing that a later check would not find."""

from __future__ import annotations

import socket
from contextlib import suppress

import numpy as np

from kvfold_client import errors
from kvfold_client.wire import FRAME
from tests.soak.soaker import Soaker
from tests.soak.steps import handles_of, lengths_of, rows_of


def read_stale(soaker: Soaker) -> None:
    for handle in soaker.dead[:1]:
        with suppress(errors.StaleHandle):
            soaker.client.read_pages([handle])
            raise AssertionError("a handle of a page that was freed is read")
        soaker.counts["stale handles refused"] += 1


def read_as_a_stranger(soaker: Soaker) -> None:
    if (live := soaker.pick()) and (wanted := handles_of(live)):
        with suppress(errors.UnknownHandle):
            soaker.stranger.read_pages([wanted[0][-1]])
            raise AssertionError("a handle of another tenant is read")


def send_nonsense(soaker: Soaker) -> None:
    """Each is refused, and changes nothing that a later check would not find."""
    if (live := soaker.pick()) and (step := lengths_of(soaker, [live], 4)):
        rows, length = rows_of(soaker, step), step[0][1]
        wrong = {name: part.copy() for name, part in rows.items()}
        wrong[str(soaker.rng.choice(list(wrong)))][-1, 0] = np.nan
        for start, tensors, error in (
            (live.committed, wrong, errors.NonFinite),
            (live.committed + 1, rows, errors.PositionGap),
            (live.committed - 1, rows, errors.PositionConflict),
        ):
            if start >= 0:
                with suppress(error):
                    soaker.client.step([(live.id, start, length)], tensors)
                    raise AssertionError(f"a step that must be refused with {error.__name__} ran")


def die(soaker: Soaker) -> None:
    """A connection whose client dies amid its body."""
    url = soaker.client._http.base_url
    with suppress(OSError), socket.create_connection((url.host, url.port), timeout=5) as connection:
        token = soaker.client._http.headers["authorization"]
        head = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\nContent-Type: {FRAME}\r\n"
        connection.sendall(f"{head}Content-Length: {1 + soaker.below(1 << 20)}\r\n\r\nKVF1".encode())
        connection.sendall(bytes(soaker.below(1 << 16)))
