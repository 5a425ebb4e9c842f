"""1.0 for a final response that tells a number of the row's answer which its question did not have, else 0.0.

Beside `gold_calls` it is the second half of a job: call the right tool, and then stop and say what it said.
"""

from toolgrpo.rewards import final_answer
from toolgrpo.rewards.numerals import all_numbers


def reward_func(completions, prompts, answer, **kwargs):
    return [
        float(bool((_numbers(wanted) - _numbers(_asked(prompt))) & _numbers(final_answer(completion))))
        for completion, prompt, wanted in zip(completions, prompts, answer, strict=True)
    ]


def _asked(prompt):
    return " ".join(message["content"] for message in prompt if message["role"] == "user")


def _numbers(text):
    return {round(float(number), 2) for number in all_numbers(text)}
