"""Our NIXL agent: one for a worker, which registers its page pools, meets other agents and reads from them.

Calls may come from any thread and may block; NIXL lets go of the interpreter meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from kvfold_service.caches import Caches
from kvfold_service.errors import StartError
from kvfold_service.movers.descriptors import U64

_READERS_S: Final = 5.0
_BUSY_PAUSE_S: Final = 0.001
_IDLE_PAUSE_S: Final = 0.02


class AgentError(Exception):
    """NIXL refused or failed; str() is its reason."""


class Agent:
    """`name` is unique to this worker's life. Raises StartError."""

    def __init__(self, name: str, caches: Caches) -> None:
        try:
            import nixl
        except ImportError as error:
            raise StartError(f"--nixl needs NIXL: pip install 'kvfold[nixl]' ({error})") from None
        quiet()
        named = vars(importlib.import_module("nixl._bindings")).values()
        self._errors = tuple(error for error in named if isinstance(error, type) and issubclass(error, Exception))
        self.name = name
        pages = [group.pages for group in caches.groups]
        self.memory = "VRAM" if pages[0].is_cuda else "DRAM"
        self.device = pages[0].get_device() if pages[0].is_cuda else 0
        try:
            self._agent = nixl.nixl_agent(name, _config(nixl))
            regions = [(pool.data_ptr(), pool.numel(), self.device, "") for pool in pages]
            self._agent.register_memory(regions, self.memory)
        except (*self._errors, RuntimeError) as error:  # RuntimeError: no UCX here
            raise StartError(f"--nixl: the page pools cannot be registered ({error})") from None
        self._read_until, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._answer, name="kvfold-nixl", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside NIXL must not see the interpreter go

    def expect_readers(self) -> None:
        """Somebody was just told where pages lie."""
        self._read_until = time.monotonic() + _READERS_S

    def _answer(self) -> None:
        """Over some ways (TCP) a peer that reads from us needs our hands."""
        pause = 0.0
        while not self._over.wait(pause):
            self._agent.get_new_notifs()
            pause = _BUSY_PAUSE_S if time.monotonic() < self._read_until else _IDLE_PAUSE_S

    def close(self) -> None:
        """Peers that still read from us wait in vain."""
        self._over.set()
        self._thread.join()

    @property
    def metadata(self) -> bytes:
        """How to connect, and the keys of the registered memory: a secret among peers."""
        return self._agent.get_agent_metadata()

    def meet(self, metadata: bytes) -> str:
        """The name of another agent, which can be read from now on."""
        with self._translated():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else name

    def forget(self, remote_agent: str) -> None:
        """Of a connection that is gone: the next `meet` makes a new one. Never while it may still bring bytes."""
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(remote_agent)

    def prepare(self, remote_agent: str, local: U64, remote: U64, memory: str) -> Any:
        """A read of `remote` into `local`, rows of (address, bytes, device)."""
        if self.memory == "VRAM":
            torch.cuda.set_device(self.device)  # a thread of its own has no context yet, and UCX wants one
        with self._translated():
            ours = self._agent.get_xfer_descs(local, self.memory)
            theirs = self._agent.get_xfer_descs(remote, memory)
            return self._agent.initialize_xfer("READ", ours, theirs, remote_agent)

    def post(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        with self._translated():
            return self._agent.transfer(handle)

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        with self._translated():
            return self._agent.check_xfer_state(handle)

    def release(self, handle: Any) -> None:
        """Of a transfer that has ended."""
        with self._translated():
            self._agent.release_xfer_handle(handle)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise AgentError(str(error)) from None


def _config(nixl: Any) -> Any:
    """STRICT: pulls run on threads of their own. NIXL's progress thread would take a whole core for nothing."""
    strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return nixl.nixl_agent_config(backends=["UCX"], sync_mode=strict, enable_prog_thread=False)


def quiet() -> None:
    """NIXL writes its log to stdout, which is the ready line's."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
