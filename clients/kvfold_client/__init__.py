"""kvfold's client: the wire contract and a small HTTP client that needs no torch."""

from .client import AsyncClient, Client
from .entries import decode_page, decode_rows
from .errors import ApiError, KvfoldError, ReplyError, TransportError
from .replies import CompressorState, Exported, ExportedCompressor, Page, PageDigest, RequestState, StepReply

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "CompressorState",
    "Exported",
    "ExportedCompressor",
    "KvfoldError",
    "Page",
    "PageDigest",
    "ReplyError",
    "RequestState",
    "StepReply",
    "TransportError",
    "decode_page",
    "decode_rows",
]
