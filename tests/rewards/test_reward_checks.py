"""A reward's file, signature and return value: each thing that is wrong names the file, the function and the row."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import ConfigError, PluginError, RewardError, SandboxError
from toolgrpo.rewards import get_reward, load_reward, named_rewards
from toolgrpo.rewards.base import Reward, Score

COMPLETIONS = [[{"role": "assistant", "content": text}] for text in ("one", "two", "three")]


def call(reward: Reward, **columns: Any) -> list[Score]:
    prompts = [[{"role": "user", "content": f"question {row}"}] for row in range(3)]
    return reward(prompts=prompts, completions=COMPLETIONS, completion_ids=[[1]] * 3, answer=["a", "b", "c"], **columns)


def write(tmp_path: Path, body: str, signature: str = "completions, answer, **kwargs") -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(
        f"import math\n\ndef reward_func({signature}):\n    {body}\n\ndef points(c, a):\n    return 1 / (a != 'b')\n"
    )
    return path


def test_a_reward_file_gets_what_it_asks_for(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "return [len(c[-1]['content']) for c in completions]", "completions"))
    assert call(reward) == [3.0, 3.0, 5.0]
    assert (reward.__name__, reward.source) == ("reward_func", str(tmp_path / "my_reward.py"))


def test_an_async_reward_is_awaited_also_inside_a_running_loop(tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    path.write_text(
        "import asyncio\n\nasync def reward_func(completions, answer, **kwargs):\n"
        "    await asyncio.sleep(0)\n    return [1.0] * len(completions)\n"
    )
    reward = load_reward(path)

    async def within() -> list[Score]:
        return call(reward)

    assert call(reward) == asyncio.run(within()) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return [1.0]", ["returned 1 rewards for 3 completions"]),
        ("return 1.0", ["returned float 1.0", "list of 3 numbers"]),
        ("return None", ["returned NoneType None"]),
        ("return [0.0, math.nan, 0.0]", ["float nan", "row 1", "question 1"]),
        ("return ['1', 1, 1]", ["str '1'", "row 0"]),
        (
            "return [points(c, a) for c, a in zip(completions, answer)]",
            ["ZeroDivisionError", "line 7", "row 1", "question 1"],
        ),
    ],
)
def test_what_a_reward_does_wrong_is_named(tmp_path: Path, body: str, parts: list[str]) -> None:
    path = write(tmp_path, body)
    with pytest.raises(RewardError) as caught:
        call(load_reward(path))
    for part in ["reward_func", str(path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("marker", ["<tool_call>", "[TOOL_CALLS]"])
def test_one_that_looks_for_the_marker_of_a_call_in_the_text_says_so(tmp_path: Path, marker: str) -> None:
    """It finds none: calls stand in `tool_calls`. The doctor and `check` speak where all scores are equal."""
    reward = load_reward(write(tmp_path, f"return [float({marker!r} in c[-1]['content']) for c in completions]"))
    logged: list[tuple[str, float]] = []
    scores = call(reward, log_metric=lambda name, value: logged.append((name, value)))
    assert reward.marker == marker and logged == [("rewards/reward_func/looks_for_marker", 1.0)]
    said = reward.reads_marker_in_vain(scores) or ""
    assert f"every episode scores 0.0, and its file looks for {marker}" in said
    assert reward.reads_marker_in_vain([0.0, 1.0]) is None, "it finds what it looks for"
    other = load_reward(write(tmp_path, "return [float(len(c[-1]['content'])) for c in completions]"))
    assert other.marker is None and other.reads_marker_in_vain([0.0]) is None
    assert get_reward("tool_use").reads_marker_in_vain([0.0]) is None, "built in"


def test_a_column_that_the_data_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "return [0.0] * 3", "completions, level"))
    with pytest.raises(RewardError, match=r"asks for 'level'.*answer, completion_ids, completions, prompt, prompts"):
        call(reward)


def test_a_failure_of_the_world_is_no_score() -> None:
    def reward_func(completions: Any) -> list[float]:
        raise SandboxError("the sandbox is gone")

    with pytest.raises(SandboxError, match="the sandbox is gone"):
        call(Reward(reward_func, name="reward_func", source="here"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("reward_func = 3", "reward_func must be callable"),
        ("def reward_func(outputs): return []", "must take `completions` by name"),
        ("def reward_func(completions, /): return []", "must take `completions` by name"),
        ("def score(completions): return []", "has no reward_func. It has score"),
        ("", "has no reward_func. Write one"),
        ("def reward_func(:", "SyntaxError: "),
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("ROWS: int = np.zeros(3)", "line 1 uses 'np', which it does not have; add this line at its top: import numpy"),
        (
            "import math\nX = json.loads('1')",
            "line 2 uses 'json', which it does not have; add this line at its top: import",
        ),
        (
            "@cached\ndef reward_func(completions): return []",
            "line 1 uses 'cached', which it does not have; import it, or",
        ),
    ],
)
def test_a_reward_file_that_cannot_be_used(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(PluginError) as caught:
        load_reward(path)
    assert part in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["List", "Dict", "Any", "Optional", "np", "torch", "Trajectory"])
def test_names_in_annotations_need_no_import(tmp_path: Path, name: str) -> None:
    path = tmp_path / "my_reward.py"
    hints = (f"{name}[str]", f"list[{name}]", f"{name}.x")
    for first, second, result in permutations(hints):
        path.write_text(
            f"LIMIT: {first} = 1\nclass Helper:\n    field: {second}\n    def of(self, x: {result}) -> {first}: return 0.5\n"
            f"def reward_func(completions: {first}, answer: {second}, **kwargs: {result}) -> {result}:\n"
            f"    points: {second} = Helper().of(LIMIT)\n    return [points] * len(completions)\n"
        )
        assert call(load_reward(path)) == [0.5] * 3


def test_paths_that_are_no_reward_file(tmp_path: Path) -> None:
    text = tmp_path / "reward.txt"
    text.write_text("x")
    for path, part in [
        (tmp_path, "is a folder"),
        (tmp_path / "none.py", "No such file"),
        (text, "is not a Python file"),
    ]:
        with pytest.raises(PluginError, match=part):
            load_reward(path)


def test_an_unknown_built_in_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'acuracy'.*'accuracy'.*by_task"):
        get_reward("acuracy")


def test_of_several_reward_files_each_has_the_name_of_its_file(tmp_path: Path) -> None:
    for file in (one := tmp_path / "one.py", other := tmp_path / "other.py"):
        file.write_text("def mine(completions): return [0.0] * len(completions)\n")
    assert [reward.name for reward in named_rewards([one, "gsm8k"], "mine")] == ["mine", "gsm8k"]
    assert [reward.name for reward in named_rewards([one, str(other)], "mine")] == ["one.mine", "other.mine"]


def test_a_reward_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_reward.py").write_text("POINTS = 0.5\n")
    file = tmp_path / "my_reward.py"
    file.write_text(
        "from .beside_reward import POINTS\n\n\ndef reward_func(completions, **kwargs):\n"
        "    import beside_reward\n\n    return [POINTS + beside_reward.POINTS] * len(completions)\n"
    )
    assert call(load_reward(file)) == [1.0] * 3
    file.write_text("def reward_func(completions, **kwargs):\n    return [0.25] * len(completions)\n")
    assert call(load_reward(file)) == [0.25] * 3, "an edited file is loaded anew"
