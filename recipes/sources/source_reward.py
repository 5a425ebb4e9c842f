"""1.0 for the answer said in a sentence, 0.8 less for each look-up in cedar, which is billed; nothing for another answer.

The sentence names no other value that a system showed, so that naming all of them earns nothing.
"""

import re

from toolgrpo.rewards import calls, final_answer, gives_answer

BILLED, PRICE = "cedar", 0.8
MARKUP = re.compile(r"[<>{}\[\]|`\\]|\*\*")
FEWEST_WORDS = 2  # of the sentence's own


def reward_func(completions, answer, trajectories, **kwargs):
    return [earned(*episode) for episode in zip(completions, answer, trajectories, strict=True)]


def earned(completion, right, trajectory):
    made = calls(trajectory)
    shown = {str(call.result) for call in made if call.ok}
    said = right in shown and is_sentence(final_answer(completion), right)
    if not said or [value for value in shown if gives_answer(completion, value)] != [right]:
        return 0.0
    return round(max(0.0, 1 - PRICE * sum(call.name == BILLED for call in made)), 2)


def is_sentence(final, right):
    own_words = words(final) - words(right)
    return len(own_words) >= FEWEST_WORDS and not MARKUP.search(final)


def words(text):
    return set(re.findall(r"[^\W\d_]+", text.casefold()))
