"""Conversations as tokens: the mask is on what the assistant says, whatever the template can tell."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from recipes.nano.demonstrations import demonstrate, draw_training_problem, render, render_tools
from recipes.nano.tokenizer import build_tokenizer
from recipes.nano.toolsets import CANONICAL
from toolgrpo.errors import ChatFormatError, DataError
from toolgrpo.sft.encoder import ConversationEncoder, Example, read_conversations

SCHEMAS = [tool.schema for tool in CANONICAL]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _conversations(n: int) -> list[Any]:
    rng = random.Random(0)
    return [demonstrate(draw_training_problem(rng, rng.randint(1, 3)), CANONICAL, rng, None) for _ in range(n)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer([render_tools(CANONICAL) + render(messages) for messages in _conversations(40)], 640)


def _learnt(tokenizer: Any, example: Example) -> list[str]:
    """The texts of the masked stretches."""
    stretches: list[list[int]] = []
    previous = 0
    for token, bit in zip(example.ids, example.mask, strict=True):
        if bit and not previous:
            stretches.append([])
        if bit:
            stretches[-1].append(token)
        previous = bit
    return [tokenizer.decode(ids) for ids in stretches]


def test_exactly_the_assistant_turns_are_learnt(tokenizer: Any) -> None:
    encode = ConversationEncoder(tokenizer)
    for messages in _conversations(10):
        example = encode(messages, SCHEMAS)
        whole = (render_tools(CANONICAL) + render(messages)).removesuffix("\n")
        assert tokenizer.decode(list(example.ids)) == whole
        header = "<|im_start|>assistant\n"
        turns = [render([m]).removeprefix(header).removesuffix("\n") for m in messages if m["role"] == "assistant"]
        assert _learnt(tokenizer, example) == turns


def test_a_user_who_speaks_again_is_part_of_the_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    messages = [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "The answer is 7."},
        {"role": "user", "content": "What is 1 plus 1?"},
        {"role": "assistant", "content": "The answer is 2."},
        {"role": "user", "content": "Add 1 and 2."},
    ]
    example = ConversationEncoder(tokenizer)(messages)
    assert _learnt(tokenizer, example) == ["The answer is 7.<|im_end|>", "The answer is 2.<|im_end|>"]
    after_an_example = ConversationEncoder(tokenizer)(messages, n_prompt=3)
    assert after_an_example.ids == example.ids and _learnt(tokenizer, after_an_example) == [
        "The answer is 2.<|im_end|>"
    ]


def test_a_tokenizer_without_a_template_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ChatFormatError, match="no chat template"):
        ConversationEncoder(tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: no assistant message"),
        ('{"prompt": "a", "gold_calls": []}', "line 2: no conversation.*into such: .*dead_groups.md#where-every"),
        ('{"messages": "hello"}', "line 2: no conversation"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "completion": []}', "line 2: no assistant message"),
        ("{", "line 2"),
    ],
)
def test_a_bad_row_says_where_it_stands(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    file = tmp_path / "rows.jsonl"
    file.write_text(good + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        read_conversations(file)


def test_prompt_and_completion_are_a_conversation_too_whose_prompt_is_only_shown(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    file.write_text(json.dumps(row) + "\n")
    (read,) = read_conversations(file)
    assert [m["role"] for m in read["messages"]] == ["user", "assistant"] and read["n_prompt"] == 1
    (tmp_path / "test.jsonl").write_text(json.dumps({"messages": [*row["prompt"], *row["completion"]] * 2}) + "\n")
    file.rename(tmp_path / "train.jsonl")
    assert [len(read_conversations(tmp_path, split)[0]["messages"]) for split in ("train", "test")] == [2, 4]


def test_a_mixture_gives_the_conversations_of_its_tasks_by_weight_with_their_opening(tmp_path: Path) -> None:
    for name, n in (("sums", 6), ("words", 4)):
        said = [{"role": "user", "content": name}, {"role": "assistant", "content": "ok"}]
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": said}) + "\n") * n)
    mixture = tmp_path / "both.yaml"
    tasks = f"tasks:\n- data: {tmp_path}/sums.jsonl\n  weight: 2\n- data: {tmp_path}/words.jsonl\n"
    mixture.write_text("system_prompt: Be short.\n" + tasks)
    rows = [[message["content"] for message in row["messages"]] for row in read_conversations(mixture)]
    assert sorted(rows) == [["Be short.", "sums", "ok"]] * 6 + [["Be short.", "words", "ok"]] * 3
    pair = {"prompt": said[:1], "completion": said[1:]}
    (tmp_path / "words.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    read = {(row["messages"][1]["content"], row["n_prompt"]) for row in read_conversations(mixture)}
    assert read == {("sums", 1), ("words", 2)}, "the opening is not learnt either"
    mixture.write_text(tasks + "  tools: [add]\n")
    with pytest.raises(DataError, match=r"words\.jsonl.*`toolgrpo sft`"):
        read_conversations(mixture)


def test_schemas_of_a_row_may_be_json_text_and_nothing_else(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": said, "tools": json.dumps(SCHEMAS)}) + "\n")
    assert read_conversations(file)[0]["tools"] == SCHEMAS
    file.write_text(json.dumps({"messages": said, "tools": "add, multiply"}) + "\n")
    with pytest.raises(DataError, match="`tools` must be a list of schemas"):
        read_conversations(file)
