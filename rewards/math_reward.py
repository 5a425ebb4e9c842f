"""A reward for word problems with tools: the right number, with a little for using tools well on the way.

1.0 for the right final number; 0.2 for a wrong one after a tool call that worked; 0.05 for trying to call a tool.
Start a reward of your own from a copy of this file; `reward_func` is all that is looked for.
"""

from toolgrpo.rewards import calls, final_answer
from toolgrpo.rewards.numerals import last_number, marked_answer

RIGHT, WORKED, TRIED, NOTHING = 1.0, 0.2, 0.05, 0.0


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
