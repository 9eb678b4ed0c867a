"""The control plane of a Ray cluster (extra `ray`): workers are found by the names of the actors that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..peers import Peer
from .members import Members

DIRECTORY = "kvfold.directory"
_ANSWER_S = 2.0


class RayPlane(Members):
    """Members are the workers that the actors of a namespace report; see `kvfold fleet`.

    Connects to `address` (Ray's words; None: the cluster of this machine) unless `ray` is connected already. While the
    directory of the namespace does not answer, members are those of before.
    """

    def __init__(self, address: str | None = None, *, namespace: str = "kvfold", health_seconds: float = 1.0) -> None:
        super().__init__(health_seconds)
        self._address, self._namespace = address, namespace
        self._peers: dict[str, Peer] = {}
        self._directory: Any = None

    def open(self, token: str | None) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(self._address or "auto", namespace=self._namespace, log_to_driver=False, configure_logging=False)
        super().open(token)

    def find(self) -> Mapping[str, Peer]:
        import ray
        from ray.exceptions import RayError

        try:
            if self._directory is None:
                self._directory = ray.get_actor(DIRECTORY, self._namespace)
            table: Any = ray.get(self._directory.table.remote(), timeout=_ANSWER_S)
        except (ValueError, RayError):  # not there yet, or being started again
            self._directory = None
            return self._peers
        self._peers = {name: Peer(name, url, role) for name, (url, role) in table.items()}
        return self._peers
