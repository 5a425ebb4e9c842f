"""The BFCL recipe: its reference conversations are right in whole episodes, others are not, and nothing is trained and measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.episode.trajectory import StopReason
from toolgrpo.tools import Toolbox, load_tools

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "bfcl"
CONFIG = RECIPE / "bfcl_qwen3_1.7b.yaml"
pytestmark = pytest.mark.e2e
NEEDED = "bfcl-eval is not installed: pip install --no-deps -r recipes/bfcl/requirements.txt"
needs_bfcl = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason=NEEDED)


@pytest.fixture(scope="module")
def gold() -> Iterator[Any]:
    """The recipe's own scripts, imported as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPE)
        yield import_module("replay_gold")


@pytest.fixture(scope="module")
def toolbox(gold: Any) -> Iterator[Toolbox]:
    with load_tools(RECIPE / "bfcl_environment.py", workers=2) as box:
        yield box


def category(gold: Any, name: str) -> list[Any]:
    return [task for task in gold.tasks().values() if task.category == name]


@needs_bfcl
def test_the_split_keeps_scenarios_together(gold: Any) -> None:
    tasks = gold.tasks().values()
    assert len(tasks) == 800 and {len(category(gold, name)) for name in gold.CATEGORIES} == {200}
    held = {task.scenario for task in tasks if task.held_out}
    assert len(held) == 50 and not held & {task.scenario for task in tasks if not task.held_out}
    assert all(set(task.missing) == {turn for turn, q in enumerate(task.questions) if not q} for task in tasks)


@needs_bfcl
@pytest.mark.parametrize("name", ["base", "miss_func", "miss_param", "long_context"])
def test_reference_conversations_are_right(gold: Any, toolbox: Toolbox, name: str) -> None:
    """Three of each API's domain; 173 and 49 go against their own descriptions. `replay_gold.py` plays all 800."""
    for scenario in (3, 49, 53, 103, 150, 173):
        task = category(gold, name)[scenario]
        episode = gold.play(task, toolbox)
        assert episode.reward == 1.0 and episode.stop_reason is StopReason.FINISHED, task.name
        users = [message["content"] for message in episode.messages if message["role"] == "user"]
        assert len(users) == len(task.questions) - 1
        # a function that is missing is not in the prompt, and shown by the user
        for turn, names in task.missing.items():
            assert not {*names} & {*task.functions} and all(f'"name": "{n}"' in users[turn - 1] for n in names)


@needs_bfcl
def test_what_is_not_the_reference_is_wrong(gold: Any, toolbox: Toolbox) -> None:
    task = category(gold, "base")[0]
    said = list(gold.said(task))
    silent = ["Done."] * len(task.questions)
    more = ['call touch {"file_name": "b"}', *said]  # a file that nobody asked for: another state
    for turns, reward in ((said, 1.0), (silent, 0.0), (more, 0.0), ([*said[:2], *silent], 0.0)):
        assert gold.play(task, toolbox, turns).reward == reward
    never_answers = gold.play(task, toolbox, [*said[:-1], "call pwd {}"], max_turns=len(said))
    assert never_answers.reward == 0.0 and never_answers.stop_reason is StopReason.MAX_TURNS
    mistakes = ['call cd {"folder": "nowhere"}', 'call cd {"no": 1}', "call book_flight {}"]
    wrong = gold.play(task, toolbox, [*mistakes, *said])
    assert [result.error for result in wrong.results[:3]] == [None, ToolErrorKind.RAISED, ToolErrorKind.UNKNOWN_TOOL]
    assert "unexpected keyword argument 'no'" in wrong.results[1].content
    assert wrong.reward == 1.0, "as BFCL has it: calls that change nothing cost nothing"


@needs_bfcl
def test_text_that_looks_like_a_call_is_text(gold: Any) -> None:
    """BFCL evaluates calls as Python and puts its instances' names before whatever looks like one of their methods."""
    from bfcl_world import Call, World

    world = World(category(gold, "base")[0])
    world.run(Call("touch", {"file_name": "a"}))
    text = "cat(1) and __import__('os').getcwd()"
    world.run(Call("echo", {"content": text, "file_name": "a"}))
    assert json.loads(world.run(Call("cat", {"file_name": "a"})).text) == {"file_content": text}


@needs_bfcl
def test_a_checker_that_fails_costs_its_episode_and_says_so(gold: Any) -> None:
    from bfcl_environment import ENVIRONMENT

    from toolgrpo import DropEpisode

    task = category(gold, "base")[0]
    environment = ENVIRONMENT()
    environment.reset(bfcl=task.name)
    while environment.next_user_message("x") is not None:
        pass
    environment._task = replace(task, entry={"id": task.name, "involved_classes": []})
    with pytest.raises(DropEpisode, match=f"BFCL's checker failed for {task.name}: KeyError: 'initial_config'"):
        environment.reward()


def test_without_the_package_one_sentence_says_how_to_install_it(tmp_path: Path) -> None:
    hidden = "import runpy, sys; sys.modules['bfcl_eval'] = None; "
    code = f"{hidden}sys.path.insert(0, {str(RECIPE)!r}); runpy.run_module('make_rows', run_name='__main__')"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install --no-deps -r recipes/bfcl/req" in done.stderr


def test_the_recipe_never_trains_on_what_it_measures() -> None:
    config = {key: value for heading in yaml.safe_load(CONFIG.read_text()).values() for key, value in heading.items()}
    assert config["dataset_id_or_path"] == "outputs/bfcl" and "dataset_split" not in config
    assert "eval_dataset_id_or_path" not in config and "eval_share" not in config
    assert config["reward"] == ["environment"]


@pytest.mark.slow
@needs_bfcl
def test_all_reference_conversations_are_right(gold: Any) -> None:
    assert gold.main(1) == 0
