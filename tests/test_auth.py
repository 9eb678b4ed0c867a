"""auth: a token says who calls and what for; whoever has none learns nothing else."""

from __future__ import annotations

import pytest

from kvfold_service.auth import ANYONE, ROLES, Caller, Tokens
from kvfold_service.quotas import Quota
from kvfold_service.settings import read, tokens_of_environment
from tests.service_cases import no_start, refused
from tests.test_settings import NEEDED

PREFILL, DECODE, ROOT = "prefill-0123456789", "decode-0123456789a", "root-0123456789abc"
FILE = f"""
# the two sides of one model
{PREFILL} team-a step,pull   # may do both
{DECODE}\tteam-a\tpull

{ROOT} team-b step,pull,admin
"""


def tokens(path, text: str | bytes = FILE) -> Tokens:
    file = path / "tokens"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Tokens(file)


@pytest.mark.parametrize(
    ("token", "tenant", "roles"),
    [(PREFILL, "team-a", {"step", "pull"}), (DECODE, "team-a", {"pull"}), (ROOT, "team-b", set(ROLES))],
)
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_token_says_who_calls(tmp_path, scheme, token, tenant, roles):
    assert tokens(tmp_path).caller(scheme + token) == Caller(tenant, frozenset(roles))


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer #", "Bearer é", "Basic " + PREFILL, PREFILL, f"Bearer{PREFILL}"),
        *(f"Bearer {wrong}" for wrong in (PREFILL + "x", PREFILL[:-1], f"{PREFILL} {DECODE}", PREFILL.upper())),
    ],
)
def test_anything_else_is_unauthorized(tmp_path, header):
    with refused("unauthorized"):
        tokens(tmp_path).caller(header)


def test_without_a_file_everyone_may_do_everything():
    for header in (None, "Bearer whatever", "Basic x"):
        assert Tokens(None).caller(header) is ANYONE
    ANYONE.expect("step")
    ANYONE.expect("admin")


def test_roles():
    puller = Caller("t", frozenset({"pull"}))
    puller.expect("pull")
    puller.expect("step", "pull")
    with refused("forbidden") as caught:
        puller.expect("step", "admin")
    assert "step or admin" in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("holds no token",)),
        ("# only a comment\n\n", ("holds no token",)),
        (f"{PREFILL} team-a", ("line 1",)),
        (f"\n{PREFILL} team-a step extra", ("line 2",)),
        ("short team-a step", ("line 1", "16 characters")),
        (f"{PREFILL} team/a step", ("line 1",)),
        (f"{PREFILL} team-a step,write", ("line 1", "step, pull, admin")),
        (f"{PREFILL} team-a ,", ("line 1",)),
        (b"\xff\xfe not text", ("cannot be read",)),
    ],
)
def test_a_bad_file_stops_the_start(tmp_path, text, words):
    with no_start("--token-file", *words):
        tokens(tmp_path, text)


def test_the_sentence_does_not_say_the_token_or_the_folder(tmp_path):
    with pytest.raises(Exception, match="line 1") as caught:
        tokens(tmp_path, f"{PREFILL} team-a nonsense")
    assert PREFILL not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    with no_start("--token-file", "missing"):
        Tokens(tmp_path / "missing")


def test_quotas_are_a_tenant_s(tmp_path):
    """On any of its lines, and the same wherever they are said again."""
    file = f"{PREFILL} team-a step requests=4 queue=2\n{DECODE} team-a pull pages=0 queue=2\n{ROOT} team-b admin\n"
    assert tokens(tmp_path, file).quotas == {"team-a": Quota(requests=4, pages=0, queue=2)}
    assert Tokens(None).quotas == {}


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        (("pages", ""), ("line 1", "'pages'")),
        (("pages=", ""), ("line 1",)),
        (("pages=-1", ""), ("line 1",)),
        (("pages=1.5", ""), ("line 1",)),
        (("pages=²", ""), ("line 1",)),
        ((f"pages={10**30}", ""), ("line 1",)),
        (("pages=1 pages=1", ""), ("line 1",)),
        (("tokens=1", ""), ("line 1", "requests, pages, queue, staging")),
        (("pages=1", "pages=2"), ("line 2", "team-a", "pages")),
    ],
)
def test_bad_quotas_stop_the_start(tmp_path, quotas, words):
    first, second = quotas
    with no_start("--token-file", *words):
        tokens(tmp_path, f"{PREFILL} team-a step {first}\n{DECODE} team-a pull {second}\n")


def test_a_token_belongs_to_one_tenant(tmp_path):
    """Else it would depend on the order of lines who the caller is."""
    with no_start("line 2"):
        tokens(tmp_path, f"{PREFILL} team-a step\n{PREFILL} team-b step\n")


def test_tokens_of_the_environment(monkeypatch):
    """The lines of a token file, without a file; what is wrong with them is said, and never the token itself."""
    monkeypatch.setenv("KVFOLD_TOKENS", f"# ours\n{PREFILL} team-a step,pull queue=3\n\n{ROOT} ops admin")
    tokens = Tokens(None, tokens_of_environment())
    assert tokens.caller(f"Bearer {PREFILL}").tenant == "team-a"
    assert tokens.quotas["team-a"].queue == 3
    assert tokens.secrets == [PREFILL, ROOT]
    with no_start("KVFOLD_TOKENS line 2", "TENANT"):
        Tokens(None, f"\n{PREFILL} team-a\n")
    with no_start("KVFOLD_TOKENS", "no token"):
        Tokens(None, "")
    settings = read([*NEEDED, "--host=0.0.0.0"])
    assert PREFILL not in repr(settings)
    with no_start("--token-file", "KVFOLD_TOKENS", "only one"):
        read([*NEEDED, "--token-file=tokens"])
    monkeypatch.delenv("KVFOLD_TOKENS")
    assert tokens_of_environment() is None
