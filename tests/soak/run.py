"""The soak's processes: a worker that is killed and started again, clients that are killed and replaced."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.soak.memory import MOST_GROWTH_MIB, growth_mib
from tests.soak.streams import WEIGHTS

NUM_CLIENTS = 3
LEASE_SECONDS = 4.0
_TOKENS = {"a": "token-of-a-0000000", "b": "token-of-b-0000000", "admin": "token-of-admin-000"}
_RESTARTING = 0.6
"""Share of the time in which the worker is killed and stopped."""


class Soak:
    def __init__(self, folder: Path, rate: float) -> None:
        self.folder, self._rate = folder, rate
        self.wrong: list[str] = []
        self.events: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        """Of all lives of the worker, as far as they were told before its end."""
        self.rss: list[list[tuple[float, float]]] = []
        """MiB by second, of each life of the worker."""
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        self._num_clients = 0
        self._random = random.Random(1)
        tokens = (
            "".join(f"{_TOKENS[name]} {name} step,pull pages=150\n" for name in "ab") + f"{_TOKENS['admin']} o admin\n"
        )
        (folder / "tokens").write_text(tokens)
        (folder / "key").write_bytes(b"k" * 32)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{self._port}",
            timeout=30,
            headers={"authorization": f"Bearer {_TOKENS['admin']}"},
        )
        self._worker = self._start_worker()

    # -- processes -------------------------------------------------------------------------------------------------

    def _start_worker(self) -> subprocess.Popen[str]:
        options = {
            "manifest": self.folder / "manifest.json",
            "weights": WEIGHTS,
            "backend": "cpu",
            "port": self._port,
            "max-requests": 24,
            "pages": 100,
            "max-body-bytes": 16 << 20,
            "staging-bytes": 32 << 20,
            "lease-seconds": LEASE_SECONDS,
            "canary-seconds": 5,
            "drain-seconds": 3,
            "token-file": self.folder / "tokens",
            "handle-key-file": self.folder / "key",
            "worker-id": "soak",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        with (self.folder / "log").open("a") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "kvfold_service", *flags], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert worker.stdout is not None
        with worker.stdout:
            line = worker.stdout.readline()
        assert line.startswith("ready "), (line, (self.folder / "log").read_text()[-2000:])
        self.rss.append([])
        self._started = time.monotonic()
        return worker

    def _restart(self) -> None:
        how = self._random.choice(["SIGKILL", "SIGTERM"])
        self.events[f"worker {how}"] += 1
        self._count()
        if how == "SIGKILL":
            self._worker.kill()
            self._worker.wait(30)
        else:
            self._stop_worker()
        self._worker = self._start_worker()

    def _stop_worker(self) -> None:
        self._worker.terminate()
        if (code := self._worker.wait(30)) != 0:
            self.wrong.append(f"the worker's exit code after SIGTERM is {code}")

    def _start_client(self) -> None:
        number, tenant = self._num_clients, "ab"[self._num_clients % 2]
        self._num_clients += 1
        other = "b" if tenant == "a" else "a"
        command = [sys.executable, "-m", "tests.soak.client", str(self.folder), str(self._http.base_url)]
        command += [f"--number={number}", f"--rate={self._rate / NUM_CLIENTS}", f"--lease-seconds={LEASE_SECONDS}"]
        command += [f"--token={_TOKENS[tenant]}", f"--stranger={_TOKENS[other]}", f"--admin={_TOKENS['admin']}"]
        self._clients[number] = subprocess.Popen(command)

    def _end_client(self, number: int) -> None:
        """It was told to end, or has by itself."""
        code = self._clients.pop(number).wait(90)
        if code:
            told = json.loads((self.folder / f"client-{number}.json").read_text())
            self.wrong.append(f"client {number}: code {code}\n{told.get('wrong')}")

    def kill(self) -> None:
        for process in (*self._clients.values(), self._worker):
            process.kill()
            process.wait(30)
        self._http.close()

    # -- the time --------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        next_kill, next_look = 10.0, 1.0
        restarts = [
            seconds * _RESTARTING * i / max(1, round(seconds / 150)) for i in range(1, round(seconds / 150) + 1)
        ]
        while (now := time.monotonic() - began) < seconds and not self.wrong:
            for number in [n for n, client in self._clients.items() if client.poll() is not None]:
                self._end_client(number)
            while len(self._clients) < NUM_CLIENTS:
                self._start_client()
            if now > next_kill:
                number = self._random.choice(list(self._clients))
                self._clients[number].kill()
                self._clients.pop(number).wait(30)
                self.events["client SIGKILL"] += 1
                next_kill = now + self._random.uniform(8, 20)
            if restarts and now > restarts[0]:
                restarts.pop(0)
                self._restart()
            if now > next_look:
                self._look()
                next_look = now + 5
            time.sleep(0.2)
        for client in self._clients.values():
            client.terminate()
        for number in list(self._clients):
            self._end_client(number)

    def _look(self) -> None:
        status = Path(f"/proc/{self._worker.pid}/status").read_text()
        kib = int(status.split("VmRSS:")[1].split()[0])
        self.rss[-1].append((round(time.monotonic() - self._started, 1), round(kib / 1024, 1)))
        self._check_books()

    def _check_books(self) -> dict[str, Any]:
        reply = self._http.get("/v1/integrity")
        self.events["integrity checks"] += 1
        if reply.status_code != 200:
            self.wrong.append(f"/v1/integrity: {reply.status_code} {reply.content!r}")
            return {}
        return reply.json()

    def _count(self) -> dict[str, Any]:
        stats = self._http.get("/v1/stats").raise_for_status().json()
        self.totals.update(stats["totals"])
        return stats

    # -- the end ---------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        time.sleep(LEASE_SECONDS + 2)
        stats, books = self._count(), self._check_books()
        metrics = self._http.get("/metrics").text
        self._look()
        self._stop_worker()
        counts: Counter[str] = Counter()
        for file in self.folder.glob("client-*.json"):
            counts.update(json.loads(file.read_text())["counts"])
        used = {name: pool["used"] for name, pool in stats["pools"].items()}
        if any(used.values()) or stats["requests"]["live"]:
            self.wrong.append(f"pages {used} and {stats['requests']['live']} requests are left")
        if books != {"status": "ok", "bodies": 0, "staging_bytes": 0, "replies": 0}:
            self.wrong.append(f"the books at the end: {books}")
        growth = growth_mib(self.rss[-1])
        if growth is not None and growth > MOST_GROWTH_MIB:
            self.wrong.append(f"the worker's memory grew by {growth:.1f} MiB")
        return {
            "wrong": self.wrong,
            "clients": self._num_clients,
            "events": dict(self.events),
            "checked": dict(sorted(counts.items())),
            "worker_totals": dict(self.totals),
            "proofs": [line for line in metrics.splitlines() if line.startswith("kvfold_proofs_total")],
            "pages_used_at_the_end": used,
            "growth_mib": growth,
            "rss_mib": self.rss,
        }
