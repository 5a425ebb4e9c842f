"""A reward for word problems with tools: the right number, with a little for using tools well on the way.

    reward_func    1.0 for the right final number; 0.2 for a wrong one after a tool call that worked; 0.05 for trying
                   to call a tool
    plain_reward   1.0 where the last tool response is the answer, or the final message says it; 0.3 where a tool was
                   called; else 0.0. It reads messages only, as rewards for TRL do: --reward_function_name plain_reward

Start a reward of your own from a copy of this file; `reward_func` is all that is looked for.
"""

from toolgrpo.rewards import calls, final_answer
from toolgrpo.rewards.accuracy import accuracy
from toolgrpo.rewards.exact_match import exact_match
from toolgrpo.rewards.numerals import last_number, marked_answer

RIGHT, CALLED, WORKED, TRIED, NOTHING = 1.0, 0.3, 0.2, 0.05, 0.0


def reward_func(completions, answer, trajectories, **kwargs):
    return [
        _score(completion, expected, trajectory)
        for completion, expected, trajectory in zip(completions, answer, trajectories, strict=True)
    ]


def _score(completion, expected, trajectory):
    given = last_number(marked_answer(final_answer(completion)))
    if given is not None and given == last_number(marked_answer(str(expected))):
        return RIGHT
    made = calls(trajectory)
    if any(call.ok for call in made):
        return WORKED
    return TRIED if made else NOTHING


def plain_reward(completions, answer, **kwargs):
    by_tools = accuracy(completions, answer)  # 1.0 for the answer, 0.1 for any other response
    by_words = exact_match(completions, answer)
    return [
        RIGHT if 1.0 in (tools, words) else CALLED if tools else NOTHING
        for tools, words in zip(by_tools, by_words, strict=True)
    ]
