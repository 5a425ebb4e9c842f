"""What others wrote steers no terminal and tears no line, and nothing of it is lost."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable

import pytest

from toolgrpo.support.plain_text import plain, plain_json, without_secrets

HOSTILE = "\x1b]0;owned\x07\x1b[2J \x9b31m \x85 \u2028 \u2029 \u202e \u2066 \ufeff \ud800 \x7f \x00 \r"


def test_what_would_steer_a_terminal_is_written_out() -> None:
    assert plain("\x1b[2Jé\tn\n") == "\\x1b[2Jé\tn\n"
    shown = plain(HOSTILE)
    assert shown.splitlines() == [shown] and all(unicodedata.category(c)[0] != "C" for c in shown)
    ordinary = "".join(map(chr, range(0x20, 0x7F))) + "äß中\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\n\t"
    assert plain(ordinary) == ordinary


def test_json_stays_on_its_line_and_means_the_same_with_every_character_that_there_is() -> None:
    everything = "".join(map(chr, range(sys.maxunicode, -1, -1)))  # no two halves that make a whole character
    value = {"text": everything, HOSTILE: [HOSTILE, 'quoted \\" \\\\ \\u2028']}
    text = plain_json(json.dumps(value, ensure_ascii=False))
    assert text.splitlines() == [text] and json.loads(text) == value
    text.encode("utf-8")


SECRET_NAMES = """token hub_token HF_TOKEN hf-token api-key api_key apiKey apikey OPENAI_API_KEY access_token password
    db_passwd client-secret clientSecret secret_key credentials private.key auth signature"""
OTHER_NAMES = """max_turn_tokens max-tokens tokenizer monkey keyboard model eos_token pad_token token_id key-file passes
    author keystroke output_dir signal"""
FORMS: dict[str, Callable[[str, str], object]] = {
    "nested": lambda name, value: {"model_init_kwargs": {"a": [{name: value}], "b": 1}},
    "json": lambda name, value: json.dumps({"a": {name: value}, "b": 1}),
    "yaml": lambda name, value: f"{{a: 1, {name}: {value}, b: 2}}",
    "flag": lambda name, value: f"python agent.py --{name} {value} --verbose",
    "flag with =": lambda name, value: f"python agent.py --{name}={value} -v",
    "quoted flag": lambda name, value: f"agent --{name} '{value}' --other \"x y\"",
    "double": lambda name, value: f'agent --{name}="{value}"',
    "short": lambda name, value: f"agent -{name} {value}",
    "environment": lambda name, value: f"env {name.replace('-', '_').replace('.', '_')}={value} python agent.py",
    "query": lambda name, value: f"https://host/data.jsonl?x=1&{name}={value}&y=2#end",
    "first of a query": lambda name, value: f"see https://host/data.jsonl?{name}={value}",
    "header": lambda name, value: f"curl -H '{name}: {value}' http://host:80/",
    "list": lambda name, value: [f"https://host/?{name}={value}", "other"],
}
VALUES = ("hunter2", "aB3/x+Y=", "12345x", "p-q_r.s~t")


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_blanked_wherever_it_is_named(form: str) -> None:
    for name in SECRET_NAMES.split():
        for value in VALUES:
            given = FORMS[form](name, value)
            kept = without_secrets(given)
            assert value not in str(kept), (given, kept)
            assert without_secrets(kept) == kept, "blanking twice is blanking once"
            assert ("b" not in str(given)) or ("b" in str(kept))
    for name in OTHER_NAMES.split():
        given = FORMS[form](name, "512")
        assert without_secrets(given) == given


LOGINS = ("user:hunter2", ":hunter2", "hunter2", "user:p@hunter2", "user:%40hunter2", "user:hunter2:x")


@pytest.mark.parametrize("text", ["{}", "--url {} -v", '{{"urls": ["{}"]}}', "a,{},b"])
def test_a_login_in_a_url_is_blanked(text: str) -> None:
    for scheme in ("http", "https", "s3", "postgres+psycopg"):
        for login in LOGINS:
            kept = without_secrets(text.format(f"{scheme}://{login}@host:8000/path"))
            assert "hunter2" not in kept and "@host:8000/path" in kept


NO_SECRETS = """gsm8k:recipes/data/gsm8k_30.jsonl http://localhost:8000/v1 https://host/@user/model@v2 a@b.c C:/x --token
    recipes/agents/arithmetic.py:run"""
SENTENCES = ("python -m run --max-tokens 64 --key-file k.pem", "{num_cycles: 2}", "The token that follows.", "key: ")


def test_what_is_no_secret_stays() -> None:
    for text in (*NO_SECRETS.split(), *SENTENCES):
        assert without_secrets(text) == text


def test_keys_that_are_known_by_their_form_are_blanked_anywhere() -> None:
    for secret in ("sk-proj-abcdefgh1234", "hf_abcdefghij", "ghp_abcdefghij12", "github_pat_abcdefghij"):
        assert without_secrets(f"agent {secret} go") == "agent *** go"
