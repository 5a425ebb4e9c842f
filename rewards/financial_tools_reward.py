"""A reward for questions that one of many tools answers: partial credit on the way to the right answer.

    0.1    some tool was called
    0.25   one of the tools in the column `expected_tools` was called
    0.5    and it worked without an error
    0.75   and its result holds the answer
    1.0    and the final response says it, and no other number that the question does not have

Numbers count as equal within 0.1 %, so rounding in the final response is no mistake. Calling every tool there is does
not pay: each tool that was not expected takes away 0.05. A right answer without the tool is worth nothing, because
what is trained here is the choice of tools.
"""

from toolgrpo.rewards import calls, final_answer
from toolgrpo.rewards.numerals import all_numbers

TOLERANCE = 0.001
UNEXPECTED = 0.05


def reward_func(completions, prompts, answer, expected_tools, trajectories, **kwargs):
    return [
        _score(_new_numbers(final_answer(completion), prompt), float(expected), set(tools), calls(trajectory))
        for completion, prompt, expected, tools, trajectory in zip(
            completions, prompts, answer, expected_tools, trajectories, strict=True
        )
    ]


def _new_numbers(response, prompt):
    """Return the numbers of a response that the question does not have."""
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return set(all_numbers(response)) - set(all_numbers(question))


def _score(said, expected, tools, made):
    if not made:
        return 0.0
    chosen = [call for call in made if call.name in tools]
    if not chosen:
        return 0.1
    worked = [call for call in chosen if call.ok]
    score = 0.25
    if worked:
        score = 0.5
        if any(_holds(call.result, expected) for call in worked):
            score = 1.0 if said and all(_near(number, expected) for number in said) else 0.75
    unexpected = {call.name for call in made} - tools
    return max(0.1, score - UNEXPECTED * len(unexpected))


def _holds(text, expected):
    return any(_near(number, expected) for number in all_numbers(text))


def _near(number, expected):
    return abs(float(number) - expected) <= TOLERANCE * abs(expected) + 1e-9
