"""1.0 for the answer said in a sentence, 0.8 less for each look-up in cedar, which is billed; nothing for another answer.

The sentence names no other value that a system showed, so that naming all of them earns nothing.
"""

import re

from toolgrpo.rewards import calls, final_answer

BILLED, PRICE = "cedar", 0.8
MARKUP = re.compile(r"[<>{}\[\]|`\\]|\*\*")
FEWEST_WORDS = 2  # of the sentence's own


def reward_func(completions, answer, trajectories, log_metric, **kwargs):
    scores, n_right, n_billed = [], 0, 0
    for completion, right, trajectory in zip(completions, answer, trajectories, strict=True):
        made = calls(trajectory)
        said = is_said(final_answer(completion), right, [str(call.result) for call in made if call.ok])
        billed = sum(call.name == BILLED for call in made)
        scores.append(said * round(max(0.0, 1 - PRICE * billed), 2))
        n_right, n_billed = n_right + said, n_billed + billed
    log_metric("sources/right", n_right / len(scores))
    log_metric("sources/billed", n_billed / len(scores))
    return scores


def is_said(final, right, shown):
    others = [value for value in shown if not _holds(right, value)]
    own_words = set(_words(final)) - set(_words(right))
    sentence = len(own_words) >= FEWEST_WORDS and not MARKUP.search(final)
    return sentence and right in shown and _holds(final, right) and not any(_holds(final, value) for value in others)


def _words(text):
    return re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", text.casefold())


def _holds(text, value):
    return f" {' '.join(_words(value))} " in f" {' '.join(_words(text))} "
