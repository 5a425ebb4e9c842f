"""Variables that are named like secrets stay with the trainer, but for those that a plugin asks for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolgrpo.errors import PluginError
from toolgrpo.support.plain_text import is_secret_variable
from toolgrpo.tools import load_tools, run_tool

pytestmark = pytest.mark.filterwarnings("ignore:the model will see only")

_FILE = """
import os
{head}
AT_IMPORT = os.environ.get("TEST_API_KEY")

def look(name: str) -> str:
    '''Look for a variable.'''
    return os.environ.get(name, "nothing") + f" {{AT_IMPORT}}"

TOOL_FUNCTIONS = [look]
"""


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEST_API_KEY", "TEST_TOKEN", "test_password", "TEST_PLAIN"):
        monkeypatch.setenv(name, f"of {name}")


def seen(source: object, *names: str) -> list[str]:
    with load_tools(source, workers=1) as box:  # type: ignore[arg-type]
        results = [run_tool(box, {"name": "look", "arguments": {"name": name}}) for name in names]
    assert all(result.ok for result in results), results
    return [result.content for result in results]


def write(folder: Path, head: str = "") -> Path:
    path = folder / "looking_tools.py"
    path.write_text(_FILE.format(head=head))
    return path


SECRET = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD db_password TOKEN OPENAI_APIKEY "
    "GOOGLE_APPLICATION_CREDENTIALS SSH_PASSPHRASE MYSQL_PWD REDISCLI_AUTH openaiApiKey TOKEN2"
)
OTHER = "PATH HOME TOKENIZERS_PARALLELISM PWD SSH_AUTH_SOCK MONKEY TOOLGRPO_HTTP_HOSTS TOOLGRPO_SEARCH_URL LANG"


def test_names_of_secrets_and_of_others() -> None:
    assert [name for name in f"{SECRET} {OTHER}".split() if is_secret_variable(name)] == SECRET.split()


def test_by_default_tools_see_none(tmp_path: Path) -> None:
    found = seen(write(tmp_path), "TEST_TOKEN", "test_password", "TEST_PLAIN")
    assert found == ["nothing None", "nothing None", "of TEST_PLAIN None"]


@pytest.mark.parametrize("starts_a_thread", [False, True])
def test_what_is_asked_for_is_there_from_the_import_on_and_nothing_else(tmp_path: Path, starts_a_thread: bool) -> None:
    """With a thread in the import, workers are started by exec."""
    head = 'TOOL_SECRETS = ["TEST_API_KEY", "TEST_NOT_SET_KEY"]\n'
    if starts_a_thread:
        head += "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    found = seen(write(tmp_path, head), "TEST_API_KEY", "TEST_TOKEN")
    assert found == ["of TEST_API_KEY of TEST_API_KEY", "nothing of TEST_API_KEY"]


TOOL_SECRETS = ["TEST_TOKEN"]


def look(name: str) -> str:
    """Look for a variable."""
    return os.environ.get(name, "nothing")


def test_functions_ask_by_the_module_that_holds_them() -> None:
    assert seen([look], "TEST_TOKEN", "TEST_API_KEY") == ["of TEST_TOKEN", "nothing"]


@pytest.mark.parametrize("value", ["NAMES", '"TEST_API_KEY"', "[1]", "[name for name in ()]"])
def test_what_is_not_a_list_of_names_is_refused(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"NAMES = []\nTOOL_SECRETS = {value}")
    with pytest.raises(PluginError, match="TOOL_SECRETS"):
        load_tools(path, workers=1)


def test_an_import_that_fails_for_want_of_one_says_what_to_write(tmp_path: Path) -> None:
    path = write(tmp_path, 'os.environ["TEST_TOKEN"]')
    with pytest.raises(PluginError, match=r"TOOL_SECRETS = \['TEST_TOKEN'\]"):
        load_tools(path, workers=1)
