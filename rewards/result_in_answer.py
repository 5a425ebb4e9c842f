"""1.0 for a final response with a number of the tool's last result that the question did not have, else 0.0.

The result may stand in the prompt: a row may begin after the call. Beside `gold_calls` it is the second half of a job:
call the right tool, and then stop and say what it returned. Without a result there is nothing to say, so a made-up
answer earns nothing.
"""

from toolgrpo.rewards import final_answer, last_tool_response
from toolgrpo.rewards.numerals import all_numbers


def reward_func(completions, prompts, **kwargs):
    return [_score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def _score(prompt, completion):
    asked = " ".join(message["content"] for message in prompt if message["role"] == "user")
    new = _numbers(last_tool_response([*prompt, *completion]) or "") - _numbers(asked)
    return float(bool(new & _numbers(final_answer(completion))))


def _numbers(text):
    return {round(float(number), 2) for number in all_numbers(text)}
