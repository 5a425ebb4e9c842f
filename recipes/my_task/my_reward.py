"""Your reward: one number for each episode. A column of data.jsonl is an argument of the same name."""

import re


def reward_func(completions, answer, **kwargs):
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        last = completion[-1]
        said = last["content"] if last["role"] == "assistant" else ""
        words = re.findall(r"-?\w+(?:[.,]\w+)*", said)  # whole values: "7" is not in "47" or "7.5"
        scores.append(1.0 if right in words else 0.0)
    return scores
