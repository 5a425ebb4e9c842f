"""1.0 for a final response that tells a person the tool's last result in a sentence, else 0.0.

The sentence has a number of the result that the question did not have, and words; it has no tag, JSON or other markup,
and it is not the result copied. Without a result, or with an error, there is nothing to say, so a made-up answer earns
nothing, and so does a result from before the last question: an example in the prompt. The result may stand in the
prompt after that question, for a row that begins after the call. Beside `gold_calls` it is the second half of a job:
call the right tool, and then stop and say what it returned.
"""

import re

from toolgrpo.rewards import final_answer, last_tool_response
from toolgrpo.rewards.numerals import all_numbers

MARKUP = re.compile(r"[<>{}\[\]|`\\]|\*\*|^\s*(?:[#*-]\s|\w+:\s*$)", re.MULTILINE)
FEWEST_WORDS = 3  # of the sentence's own, which the result does not have
SHORT = 4  # words of a result that can only be told by itself
SMALL_WORDS = {"a", "and", "is", "the"}  # which make a sentence of it, in the result too or not


def reward_func(completions, prompts, **kwargs):
    return [_score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def _score(prompt, completion):
    last_question = max((at for at, message in enumerate(prompt) if message["role"] == "user"), default=-1)
    answer, result = final_answer(completion), last_tool_response([*prompt[last_question + 1 :], *completion]) or ""
    asked = prompt[last_question]["content"] if last_question >= 0 else ""
    if result.startswith("Error: "):
        return 0.0
    new = _numbers(result) - _numbers(asked)
    return float(bool(new & _numbers(answer)) and _is_sentence(answer, result))


def _is_sentence(answer, result):
    own_words = _words(answer) - (_words(result) - SMALL_WORDS)
    copied = len(result.split()) > SHORT and " ".join(result.split()) in " ".join(answer.split())
    return len(own_words) >= FEWEST_WORDS and not copied and not MARKUP.search(answer)


def _words(text):
    return {word.lower() for word in re.findall(r"[^\W\d_]+", text)}


def _numbers(text):
    return {round(float(number), 2) for number in all_numbers(text)}
