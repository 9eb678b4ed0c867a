"""docs/errors.md has an entry for every code, under its status, and says of each whether it may be sent again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold_client.codes import RETRYABLE, STATUS
from tests import promql

TEXT = (Path(__file__).parents[1] / "docs/errors.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=\n#|\Z)", TEXT, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("code", STATUS)
def test_every_code_has_an_entry(code: str) -> None:
    status, again, advice = ENTRIES[code].split(" · ", 2)
    assert int(status) == STATUS[code]
    assert again == ("again: yes" if code in RETRYABLE else "again: no")
    assert len(advice.split()) >= 10


def test_no_entry_is_for_nothing() -> None:
    assert list(ENTRIES) == list(dict.fromkeys(ENTRIES))
    assert set(ENTRIES) == set(STATUS)


def test_entries_stand_under_their_status() -> None:
    for heading, body in re.findall(r"^## .*?: ([\d, ]+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL):
        statuses = {int(status) for status in heading.split(", ")}
        assert {STATUS[code] for code in re.findall(r"^### `(\w+)`", body, re.MULTILINE)} == statuses


def test_alerts_that_it_names_exist() -> None:
    assert set(re.findall(r"`(Kvfold\w+)`", TEXT)) <= {rule["alert"] for rule in promql.alert_rules()}
