"""Clients of many workers, which share what is dear to make: the certificates that they trust."""

import functools
import ssl
from typing import Literal

import httpx

from ..client import Client


@functools.cache
def _tls() -> ssl.SSLContext:
    """Reading the authorities takes some 30 ms, for each client anew."""
    return httpx.create_ssl_context()


def connect(
    url: str,
    token: str | None,
    *,
    encoding: Literal["frame", "msgpack"] = "frame",
    timeout: float | None = 30.0,
    retries: int = 3,
) -> Client:
    transport = httpx.HTTPTransport(verify=_tls())
    return Client(url, token, encoding=encoding, timeout=timeout, retries=retries, transport=transport)
