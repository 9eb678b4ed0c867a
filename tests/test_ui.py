"""ui: the page in a real browser, beside a real worker: what it shows is what the worker did, and it follows."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hatchling.build import build_wheel
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from kvfold_client import Client
from kvfold_service import ui
from kvfold_service.tracing import PHASES
from tests.service_cases import NAMES, RATIO, Process, stream

STEP, ADMIN = "step-token-000000", "admin-token-00000"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium here: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "tokens").write_text(f"{STEP} team step,pull\n{ADMIN} ops admin\n")
    with Process(folder, f"--token-file={folder / 'tokens'}", "--max-requests=16", "--pages=64") as process:
        yield process
        assert process.end() == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[WebDriver]:
    options = Options()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1240,920"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(DRIVER))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


def text(browser: WebDriver, id: str) -> str:
    return browser.find_element(By.ID, id).text


def number(browser: WebDriver, id: str) -> int:
    return int(re.sub(r"\D", "", text(browser, id)) or -1)


def rows(browser: WebDriver, id: str) -> dict[str, list[str]]:
    """Of a table's body: each row's name, and the texts of its other cells."""
    script = "return [...document.querySelectorAll(arguments[0])].map((r) => [...r.cells].map((c) => c.textContent))"
    return {name: cells for name, *cells in browser.execute_script(script, f"#{id} tr")}


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def enter(browser: WebDriver, token: str) -> None:
    browser.find_element(By.ID, "token").send_keys(token)
    browser.find_element(By.CSS_SELECTOR, "#token-form button").click()


@needs_browser
def test_the_page_asks_for_a_token_and_keeps_it_to_itself(process, browser):
    browser.get(f"{process.url}/ui")
    until(lambda: browser.find_element(By.ID, "ask").is_displayed())
    assert not browser.find_element(By.ID, "shown").is_displayed()
    for wrong, said in (("not-a-token-at-all", "no token"), (STEP, "lacks the role admin")):
        enter(browser, wrong)
        until(lambda said=said: said in text(browser, "said"))
    enter(browser, ADMIN)
    until(lambda: browser.find_element(By.ID, "shown").is_displayed())
    assert text(browser, "state") == "ready"
    kept = browser.execute_script("return [localStorage.length, sessionStorage.length, document.cookie, location.href]")
    assert kept == [0, 0, "", f"{process.url}/ui"]
    browser.find_element(By.ID, "forget").click()
    until(lambda: browser.find_element(By.ID, "ask").is_displayed())
    refused = [line["message"] for line in browser.get_log("browser")]
    assert not [message for message in refused if "401" not in message and "403" not in message], refused


@needs_browser
def test_the_numbers_follow_the_worker(process, browser, tmp_path):
    """A few counted steps, then some seconds of load, during which the picture is taken."""
    browser.get(f"{process.url}/ui")
    until(lambda: browser.find_element(By.ID, "ask").is_displayed())
    enter(browser, ADMIN)
    until(lambda: browser.find_element(By.ID, "shown").is_displayed())
    assert number(browser, "steps") == number(browser, "tokens") == 0
    with Client(process.url, STEP) as client:
        for at in range(3):  # 3 tokens close no window of any kind
            client.step([("r", at, 1)], {name: stream(name, "r")[at : at + 1] for name in NAMES})
        client.step([("r", 3, 21)], {name: stream(name, "r")[3:24] for name in NAMES})
        until(lambda: number(browser, "steps") == 4)
        assert number(browser, "tokens") == 24
        assert number(browser, "requests") == 1
        kinds = rows(browser, "kinds")
        assert {kind: cells[-1] for kind, cells in kinds.items()} == dict.fromkeys(("csa", "hca", "indexer"), "3")
        assert list(rows(browser, "phases")) == list(PHASES)
        assert rows(browser, "counts")["entries"] == [str(sum(24 // RATIO[name] for name in NAMES))]
        pages = {pool: int(cells[1]) for pool, cells in rows(browser, "pools").items()}
        assert pages == {name: pool["used"] for name, pool in stats(process)["pools"].items()}
        client.release("r")
        until(lambda: number(browser, "requests") == 0)
    with loaded(process):
        until(lambda: float(text(browser, "steps-rate").replace("K", "")) > 0 and number(browser, "requests") > 4)
        time.sleep(4)
        picture = Path(os.environ.get("KVFOLD_ARTIFACTS", tmp_path)) / "ui.png"
        assert browser.save_screenshot(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    until(lambda: number(browser, "steps") == stats(process)["totals"]["steps"])
    assert not [line for line in browser.get_log("browser") if "Content Security Policy" in line["message"]]


@needs_browser
def test_a_worker_that_is_gone(browser, tmp_path):
    """Without tokens nobody is asked; and the page says so when nothing answers any more."""
    with Process(tmp_path) as process:
        browser.get(f"{process.url}/ui")
        until(lambda: browser.find_element(By.ID, "shown").is_displayed())
        assert not browser.find_element(By.ID, "forget").is_displayed()
        process.process.kill()
        until(lambda: text(browser, "state") == "no answer")


def stats(process: Process) -> dict:
    return httpx.get(f"{process.url}/v1/stats", headers={"authorization": f"Bearer {ADMIN}"}).json()


class loaded:  # noqa: N801
    """Some clients that prefill, decode, are refused and release, as long as the block runs."""

    def __init__(self, process: Process) -> None:
        self._over = threading.Event()
        ids = [f"r{i}" for i in range(6)]
        self._threads = [threading.Thread(target=self._run, args=(process.url, id)) for id in ids]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, url: str, id: str) -> None:
        with (
            Client(url, STEP) as client,
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {STEP}"}) as http,
        ):
            for turn in itertools.count():
                lengths = [33, *[1] * 40]
                for at, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
                    if self._over.is_set():
                        return
                    client.step([(id, at, length)], {name: stream(name, id)[at : at + length] for name in NAMES})
                    time.sleep(0.02)
                http.get(f"/v1/requests/{id}-{turn}")
                client.release(id)


# -- without a browser ---------------------------------------------------------------------------------------------


def test_the_page_may_do_nothing_but_ask_its_own_worker(process):
    reply = httpx.get(f"{process.url}/ui")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert policy["script-src"].startswith("'sha256-")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert set(re.findall(r"https?://[^'\" )]+", ui.PAGE)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|\sstyle=|localStorage|sessionStorage|cookie", ui.PAGE)


def test_the_page_is_in_the_wheel(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert "kvfold_service/ui.html" in zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))).namelist()
