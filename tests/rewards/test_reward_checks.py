"""A reward's file, signature and return value: each thing that is wrong names the file, the function and the row; and a reward
may leave an episode unscored."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from toolgrpo import DropEpisode
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import PluginError, RewardError
from toolgrpo.rewards import get_reward, load_reward, named_rewards
from toolgrpo.rewards.base import Reward, Score, watched
from toolgrpo.rewards.by_task import ByTask

Messages = list[dict[str, str]]


def completions(*texts: str) -> list[Messages]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def call(reward: Reward, **columns: Any) -> list[Score]:
    prompts = [[{"role": "user", "content": f"question {row}"}] for row in range(3)]
    said = completions("one", "two", "three")
    return reward(prompts=prompts, completions=said, completion_ids=[[1]] * 3, answer=["a", "b", "c"], **columns)


def write(tmp_path: Path, body: str, signature: str = "completions, answer, **kwargs") -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(
        f"import math\n\ndef reward_func({signature}):\n    {body}\n\ndef points(c, a):\n    return 1 / (a != 'b')\n"
    )
    return path


def test_a_reward_for_texts_is_told_that_it_gets_messages(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "return [float(a in c) for c, a in zip(completions, answer)]"))
    with pytest.raises(
        RewardError, match=r"my_reward\.py.*a completion is a list of messages; its text is final_answer.*line 4"
    ):
        call(reward)
    kept = load_reward(write(tmp_path, "return [float(c[0] in c and isinstance(c, list)) for c in completions]"))
    assert call(kept) == [1.0, 1.0, 1.0]


def test_a_reward_file_gets_what_it_asks_for(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "return [len(c[-1]['content']) for c in completions]", "completions"))
    assert call(reward) == [3.0, 3.0, 5.0]
    assert (reward.__name__, reward.source) == ("reward_func", str(tmp_path / "my_reward.py"))


def test_an_async_reward_is_awaited_also_inside_a_running_loop() -> None:
    async def mine(completions: Any, **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def within() -> list[Score]:
        return call(reward)

    reward = Reward(mine, name="mine", source="here")
    assert call(reward) == asyncio.run(within()) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return [1.0]", ["returned 1 rewards for 3 completions"]),
        ("return 1.0", ["float 1.0", "list of 3 numbers"]),
        ("return None", ["NoneType None"]),
        ("return [0.0, math.nan, 0.0]", ["float nan", "row 1", "question 1"]),
        ("return ['1', 1, 1]", ["str '1'", "row 0"]),
        ("return list(map(points, completions, answer))", ["ZeroDivisionError", "line 7", "row 1", "question 1"]),
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
    assert "0.0" in said and marker in said
    assert reward.reads_marker_in_vain([0.0, 1.0]) is None, "it finds what it looks for"
    other = load_reward(write(tmp_path, "return [float(len(c[-1]['content'])) for c in completions]"))
    assert other.marker is None and other.reads_marker_in_vain([0.0]) is None
    assert get_reward("tool_use").reads_marker_in_vain([0.0]) is None, "built in"


def test_a_column_that_the_data_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    reward = load_reward(write(tmp_path, "return [0.0] * 3", "completions, level"))
    with pytest.raises(RewardError, match=r"asks for 'level'.*answer, completion_ids, completions, prompt, prompts"):
        call(reward)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("reward_func = 3", "reward_func must be callable"),
        ("def reward_func(outputs): return []", "`completions` by name"),
        ("def reward_func(completions, /): return []", "`completions` by name"),
        ("def score(completions): return []", "no reward_func. It has score"),
        ("", "no reward_func"),
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("ROWS: int = np.zeros(3)", "add this line at its top: import numpy"),
        ("@cached\ndef reward_func(completions): return []", "line 1 uses 'cached'"),
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


def test_a_folder_is_no_reward_file(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="folder"):
        load_reward(tmp_path)


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


def length(completions: list[Messages], **_: Any) -> list[float | None]:
    """Refuse to judge what says `refuse`, whoever else is in the batch."""
    for completion in completions:
        if completion[0]["content"] == "refuse":
            raise DropEpisode("the judge refused")
    return [float(len(completion[0]["content"])) for completion in completions]


async def length_async(completions: list[Messages], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return length(completions)


def in_the_list(completions: list[Messages], **_: Any) -> list[float | DropEpisode]:
    texts = [completion[0]["content"] for completion in completions]
    return [DropEpisode("the judge refused") if text == "refuse" else float(len(text)) for text in texts]


def trajectory(drop: Drop | None = None, reward: float | None = None) -> Trajectory:
    return Ledger([1]).finish(StopReason.FINISHED, dropped=drop, reward=reward)


@pytest.mark.parametrize("function", [length, length_async, in_the_list])
def test_only_the_episode_that_is_meant_is_dropped(function: Any) -> None:
    first, dropped, last = watched(function)(completions=completions("a", "refuse", "abc"))
    assert (first, last) == (1.0, 3.0)
    assert dropped.at(DropCause.REWARD) == Drop(DropCause.REWARD, "the judge refused")


def test_a_reward_is_not_asked_about_what_was_dropped_before() -> None:
    seen: list[Any] = []

    def reward(completions: list[Messages], answer: list[str], **_: Any) -> list[float]:
        seen.append((len(completions), answer))
        return [1.0] * len(completions)

    gone = trajectory(Drop(DropCause.TOOL, "no network"))
    arguments = {"completions": completions("a", "b", "c"), "answer": ["x", "y", "z"]}
    asker = watched(reward)
    assert asker(trajectories=[trajectory(), gone, trajectory()], **arguments) == [1.0, None, 1.0]
    assert asker(trajectories=[gone, gone, gone], **arguments) == [None, None, None]
    assert seen == [(2, ["x", "z"])]


def test_a_failure_beside_a_drop_stays_an_error() -> None:
    def fails(completions: list[Messages], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise DropEpisode("somebody refused")
        return [1 / 0]

    with pytest.raises(RewardError, match="ZeroDivisionError"):
        Reward(fails, "r", "test")(completions=completions("a", "b"))
    too_many = watched(lambda completions, **_: [1, 2, 3] if len(completions) == 1 else length(completions))
    with pytest.raises(RewardError, match="returned 3 rewards for 1 completions"):
        too_many(completions=completions("refuse", "a"))


def test_a_drop_in_the_reward_of_one_task_is_one_of_the_mixture() -> None:
    functions: dict[str, Any] = {"judge": length, "one": lambda completions: [1.0]}
    reward = Reward(ByTask(lambda name: Reward(functions[name], name, "built in")), "by_task", "built in")
    said, logged = completions("x", "refuse", "abc"), dict[str, float]()
    scores = reward(completions=said, reward=["one", "judge", "judge"], log_metric=logged.__setitem__)
    first, dropped, last = scores
    assert (first, last) == (1.0, 3.0) and isinstance(dropped, DropEpisode)
    assert logged == {"reward_of_task/one": 1.0, "reward_of_task/judge": 3.0}


def test_the_environments_word_is_the_reward_and_one_that_met_the_deadline_is_lost() -> None:
    late = Ledger([1]).finish(StopReason.DEADLINE)
    reward = get_reward("environment")
    lost, half = reward(completions=[[], []], trajectories=[late, trajectory(reward=0.5)])
    assert half == 0.5 and isinstance(lost, DropEpisode)
    assert lost.at(DropCause.REWARD).cause is DropCause.ENVIRONMENT_LOST
    with pytest.raises(RewardError, match="episode 1"):
        reward(completions=[[], []], trajectories=[trajectory(reward=0.5), trajectory()])
