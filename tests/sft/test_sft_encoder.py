"""Conversations as tokens: the mask is on what the assistant says, whatever the template can tell; every family is taught the
words in which its calls are read later, whether its template prints calls or not."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from recipes.nano.demonstrations import demonstrate, draw_training_problem, render, render_tools
from recipes.nano.tokenizer import build_tokenizer
from recipes.nano.toolsets import CANONICAL
from tests.support.chat_families import template_names, trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling
from tests.support.fetched_tokenizers import fetched_tokenizer
from tests.support.real_tokenizers import NotAtHand
from toolgrpo.chat import resolve_format
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import ChatFormatError, DataError
from toolgrpo.sft.encoder import ConversationEncoder, read_conversations

pytestmark = pytest.mark.contract

GOOD = '<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'
THOUGHT = {"role": "assistant", "content": "It is 13.", "reasoning_content": "fine"}
CONVERSATION = [
    {"role": "user", "content": "What is x?"},
    calling(("look_up", {"key": "x"})),
    {"role": "tool", "name": "look_up", "content": "12"},
    {"role": "assistant", "content": "It is 12."},
    {"role": "user", "content": "And y?"},
    calling(("look_up", {"key": "y"}), content="Let me see."),
    {"role": "tool", "name": "look_up", "content": "13"},
    THOUGHT,
]
BROKEN = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]}


class Taught:
    """A conversation as its family is taught it."""

    def __init__(self, family: Any, *messages: Any, schemas: Any = (LOOK_UP,), n_prompt: int = 0) -> None:
        self.tokenizer = trl_tokenizer(family) if isinstance(family, str) else family
        try:
            chat = resolve_format(self.tokenizer)
        except ChatFormatError as refused:
            if not isinstance(family, str):
                raise
            pytest.skip(f"toolgrpo does not train this family: {str(refused)[:80]}")
        assert isinstance(chat, TemplateFormat)
        self.chat = chat
        encode = ConversationEncoder(self.tokenizer, chat)
        example = encode(messages, schemas, n_prompt)
        self.ids, self.mask, self.untaught = example.ids, example.mask, example.untaught
        changes = [at for at, (one, other) in enumerate(pairwise((0, *self.mask, 0))) if one != other]
        self.spans = list(zip(changes[::2], changes[1::2], strict=True))  # the stretches that are learnt

    def turns(self) -> list[ParsedTurn]:
        """What is learnt, read as sampled turns are."""
        return [self.chat.parse(self.ids[start:end], before=self.ids[:start]) for start, end in self.spans]

    def texts(self) -> list[str]:
        """What is learnt, each turn without the token that ends it."""
        return [self.tokenizer.decode(self.ids[start : end - 1]) for start, end in self.spans]

    def learns(self, token: str) -> bool:
        return any(self.tokenizer.convert_tokens_to_ids(token) in self.ids[start:end] for start, end in self.spans)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", template_names())
def test_what_is_taught_is_read_as_it_was_meant(name: str) -> None:
    first, answer, second, thought = turns = Taught(name, *CONVERSATION).turns()
    for turn, key in ((first, "x"), (second, "y")):
        assert [(a.status, a.name, a.arguments) for a in turn.attempts] == [(AttemptStatus.OK, "look_up", {"key": key})]
    assert (answer.content.strip(), answer.attempts) == ("It is 12.", ())
    assert (thought.content.strip(), thought.attempts) == ("It is 13.", ())
    assert all(turn.closed for turn in turns if turn is not answer or name != "gptoss")


def test_an_answer_that_a_user_replies_to_ends_as_the_template_prints_it() -> None:
    """GPT-OSS ends its last answer with `<|return|>`, which its template prints nowhere else."""
    asked = {"role": "user", "content": "?"}
    messages = [asked, said("One."), asked, said("Two.")]
    taught = Taught("gptoss", *messages)
    assert list(taught.ids) == taught.chat.encode(taught.chat.render(messages, [LOOK_UP], ask=False))
    assert [turn.closed for turn in taught.turns()] == [False, True]


@pytest.mark.parametrize("name", template_names())
def test_the_tokens_are_those_of_the_ledger(name: str) -> None:
    """Prompt, turn, bridge, turn: what an episode of reinforcement learning would hold."""
    taught = Taught(name, *CONVERSATION[:4])
    (start, end), (behind, last) = taught.spans
    asked, ids = CONVERSATION[:1], list(taught.ids)
    thinks = next(
        flag
        for flag in (None, True, False)
        if taught.chat.prompt(asked, [LOOK_UP], enable_thinking=flag) == ids[:start]
    )
    row: dict[str, Any] = {"messages": asked, "schemas": [LOOK_UP], "enable_thinking": thinks}
    assert ids[end:behind] == taught.chat.bridge(ids[:end], CONVERSATION[2:3], **row) and last == len(ids)


def test_calls_written_into_the_text_are_taught_as_tokens() -> None:
    """Data sets often hold the markers as text; in other people's messages they stay letters."""
    taught = Taught("qwen3", {"role": "user", "content": "<tool_call> x?"}, said(f"<think>\nhm\n</think>\n\n{GOOD}"))
    (turn,) = taught.turns()
    assert [attempt.arguments for attempt in turn.attempts] == [{"key": "x"}]
    assert (turn.reasoning or "").strip() == "hm"
    marker = taught.tokenizer.convert_tokens_to_ids("<tool_call>")
    schemas_alone = taught.chat.prompt([{"role": "user", "content": "x?"}], [LOOK_UP])
    assert taught.ids[: taught.spans[0][0]].count(marker) == schemas_alone.count(marker)


@pytest.mark.parametrize("name", ["llama3_1", "gptoss", "qwen3", "glm4moe"])
def test_every_call_of_a_turn_is_learnt_and_its_own_result_is_shown_behind_it(name: str) -> None:
    both = calling(("look_up", {"key": "x"}), ("find", {"key": "y"}))
    both["tool_calls"] = [{**call, "id": f"id{place}"} for place, call in enumerate(both["tool_calls"])]
    first, second = ({"role": "tool", "tool_call_id": f"id{n}", "content": of} for n, of in enumerate(("of x", "of y")))
    taught = Taught(name, {"role": "user", "content": "?"}, both, second, first, said("Both."))
    turns = taught.turns()
    calls = [(one.name, one.arguments) for turn in turns for one in turn.attempts]
    assert calls == [("look_up", {"key": "x"}), ("find", {"key": "y"})] and turns[-1].content.strip() == "Both."
    text = taught.tokenizer.decode(taught.ids)
    assert "unknown" not in text, "a result has the name of its call"
    if taught.chat.family.one_call:
        assert text.index("of x") < text.index('"y"') < text.index("of y"), "each result behind its own call"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # an answer that only looks like a call
        ("llama3_1", '{"name": "Ann", "age": 30}'),
        # thinking in a text, where the template prints none
        *((name, "<think>\nhm\n</think>\n\nIt is 12.") for name in ("qwen2_5", "qwen3_instruct_2507", "llama3")),
    ],
)
def test_an_answer_is_taught_as_it_stands(name: str, text: str) -> None:
    assert Taught(name, CONVERSATION[0], said(text), schemas=()).texts() == [text]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "deepseekv3"])
@pytest.mark.parametrize("text", ["The tag </think> ends it.", "Write `<think>` before and `</think>` behind it."])
def test_an_answer_about_the_markers_of_thinking_is_taught_whole(name: str, text: str) -> None:
    (taught,) = Taught(name, CONVERSATION[0], said(text)).texts()
    assert taught.endswith(text) and taught.removesuffix(text).split() in ([], ["</think>"], ["<think>", "</think>"])


@pytest.mark.parametrize("name", ["qwen2_5", "llama3"])
def test_nothing_is_lost_before_an_end_of_thinking_that_nothing_opened(name: str) -> None:
    text = "hm\n</think>\n\nIt is 12."
    assert Taught(name, CONVERSATION[0], said(text)).texts() == [text]


def test_thinking_in_the_text_of_a_turn_with_calls_is_thinking() -> None:
    taught = Taught("qwen3", CONVERSATION[0], calling(("look_up", {"key": "x"}), content="<think>\nhm\n</think>"))
    (turn,) = taught.turns()
    assert (turn.reasoning or "").strip() == "hm" and len(turn.attempts) == 1 and taught.learns("</think>")


def test_thinking_beside_a_text_is_taught_where_the_template_prints_none() -> None:
    messages = [CONVERSATION[0], {**said("It is 12."), "reasoning_content": "hm"}]
    assert Taught("qwen2_5", *messages, schemas=()).texts() == ["<think>\nhm\n</think>\n\nIt is 12."]


def test_turns_are_taught_behind_the_header_that_the_run_had() -> None:
    """With thinking switched off, empty thinking belongs to the prompt: no token of it is learnt."""
    tokenizer = trl_tokenizer("qwen3")
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    row: dict[str, Any] = {"schemas": [LOOK_UP], "enable_thinking": False}
    ids, mask = chat.prompt(CONVERSATION[:1], [LOOK_UP], enable_thinking=False), list[int]()
    mask += [0] * len(ids)
    for text, results in ((f"{GOOD}", CONVERSATION[2:3]), ("It is 12.", [])):
        turn = [*chat.encode(text), chat.stop_ids[0]]
        ids, mask = [*ids, *turn], [*mask, *[1] * len(turn)]
        if results:
            bridge = chat.bridge(ids, results, messages=CONVERSATION[:1], **row)
            ids, mask = [*ids, *bridge], [*mask, *[0] * len(bridge)]
    taught = ConversationEncoder(tokenizer, chat)(CONVERSATION[:4], [LOOK_UP], 1, enable_thinking=False)
    assert (list(taught.ids), list(taught.mask)) == (ids, mask)


def test_an_answer_ends_as_the_template_ends_one_that_a_user_replies_to() -> None:
    taught = Taught("glm4moe", *CONVERSATION)
    ends = taught.tokenizer.convert_ids_to_tokens([taught.ids[end - 1] for _, end in taught.spans])
    assert ends == ["<|observation|>", "<|user|>", "<|observation|>", "<|user|>"]


def test_the_words_of_a_user_are_shown_whole() -> None:
    asks = "Now write the STUB class"
    taught = Taught("qwen3", CONVERSATION[0], THOUGHT, {"role": "user", "content": asks}, THOUGHT, schemas=())
    assert f"<|im_start|>user\n{asks}<|im_end|>" in taught.tokenizer.decode(taught.ids)


def test_words_about_calls_are_taught_as_they_stand_and_a_broken_call_beside_a_good_one_is_an_error() -> None:
    words = "Put it between <tool_call> and </tool_call>."
    taught = Taught("qwen3", CONVERSATION[0], said(f"<think>\nhm\n</think>\n\n{words}"), schemas=())
    assert words in taught.texts()[0] and not taught.learns("<tool_call>")
    assert taught.learns("</think>"), "thinking is thinking"
    with pytest.raises(ChatFormatError, match="cannot be read"):
        Taught("qwen3", CONVERSATION[0], said(f"{GOOD}\n<tool_call>\n{{broken\n</tool_call>"), schemas=())


@pytest.mark.parametrize(
    ("name", "thinks", "untaught"),
    [
        ("qwen3", True, set()),
        ("llama3_1", True, {"thinking", "text beside calls"}),
        ("llama3_1", False, {"text beside calls"}),
        ("llama3", True, set()),
    ],
)
def test_what_the_template_does_not_print_of_a_turn_is_named(name: str, thinks: bool, untaught: set[str]) -> None:
    thought = {"reasoning_content": "hm"} if thinks else {}
    messages = [CONVERSATION[0], {**CONVERSATION[5], **thought}, *CONVERSATION[6:7], said("It is 13.")]
    assert Taught(name, *messages).untaught == untaught
    assert Taught(name, *messages, n_prompt=3).untaught == set(), "what is only shown is not missed"


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v2", "gemma4_v5", "llama3_1", "qwen3", "lfm2_2_5"])
def test_a_user_may_speak_behind_a_result(name: str) -> None:
    messages = [*CONVERSATION[:3], CONVERSATION[4], said("It is 13.")]
    taught = Taught(name, *messages)
    assert list(taught.ids) == taught.chat.encode(taught.chat.render(messages, [LOOK_UP], ask=False))[: len(taught.ids)]
    assert taught.texts()[-1].endswith("It is 13.")


def test_a_first_message_of_the_assistant_is_named_where_the_template_cannot_print_it() -> None:
    assert Taught("llama3", said("Hello."), *CONVERSATION[:1], said("One.")).texts() == ["Hello.", "One."]
    with pytest.raises(ChatFormatError, match=r"qwen3 .*assistant message"):
        Taught("qwen3", said("Hello."), *CONVERSATION[:1], said("One."))


def test_a_system_message_that_the_template_moves_to_the_last_question_is_shown() -> None:
    """Mistral Nemo's prints it there alone."""
    try:
        tokenizer = fetched_tokenizer("mistral-nemo")
    except NotAtHand as error:
        pytest.skip(str(error))
    taught = Taught(tokenizer, {"role": "system", "content": "Be brief."}, *CONVERSATION[:4])
    assert taught.texts()[-1] == "It is 12." and taught.turns()[0].attempts[0].arguments == {"key": "x"}
    assert "[INST]Be brief.\n\nWhat is x?[/INST]" in tokenizer.decode(taught.ids)


def test_thinking_that_one_switch_leaves_open_is_taught_where_turns_print_none() -> None:
    """As in the copies of QwQ's template whose header closes it unless thinking is asked for."""
    try:
        tokenizer = fetched_tokenizer("qwq")
    except NotAtHand as error:
        pytest.skip(str(error))
    taught = Taught(tokenizer, *CONVERSATION[:3], THOUGHT)
    assert taught.texts()[-1] == "fine\n</think>\n\nIt is 13."


# Rows, and nano's own tokenizer

SAID = [{"role": "user", "content": "a"}, said("b")]
SCHEMAS = [tool.schema for tool in CANONICAL]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations(n: int) -> list[Any]:
    rng = random.Random(0)
    return [demonstrate(draw_training_problem(rng, rng.randint(1, 3)), CANONICAL, rng, None) for _ in range(n)]


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer([render_tools(CANONICAL) + render(messages) for messages in conversations(40)], 640)


def test_exactly_the_assistant_turns_are_learnt(tokenizer: Any) -> None:
    for messages in conversations(10):
        taught = Taught(tokenizer, *messages, schemas=SCHEMAS)
        whole = (render_tools(CANONICAL) + render(messages)).removesuffix("\n")
        assert tokenizer.decode(list(taught.ids)) == whole
        header, ends = "<|im_start|>assistant\n", "<|im_end|>\n"
        turns = [render([m]).removeprefix(header).removesuffix(ends) for m in messages if m["role"] == "assistant"]
        assert taught.texts() == turns


def test_a_user_who_speaks_again_is_part_of_the_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    messages = [*SAID, {"role": "user", "content": "And c?"}, said("d"), SAID[0]]
    whole, after_an_example = (Taught(tokenizer, *messages, schemas=(), n_prompt=n) for n in (0, 3))
    assert whole.texts() == ["b", "d"] and after_an_example.texts() == ["d"] and after_an_example.ids == whole.ids


def test_a_tokenizer_without_a_template_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ChatFormatError, match="no chat template"):
        ConversationEncoder(tokenizer)
    tokenizer.chat_template = {"rag": CHATML, "plain": CHATML}
    with pytest.raises(ChatFormatError, match=r"\(rag, plain\).*`default`"):
        ConversationEncoder(tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: no assistant message"),
        ('{"prompt": "a", "gold_calls": []}', "line 2: no conversation.*into such: .*dead_groups.md#where-every"),
        ('{"messages": "hello"}', "line 2: no conversation"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', "line 2: no conversation.*`from` to `role`"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "completion": []}', "line 2: no assistant message"),
        ("{", "line 2"),
        (json.dumps({"messages": [BROKEN]}), "line 2: the arguments of a call are no JSON"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2, message 1: its content must be text"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "line 2: no assistant message"),
        (json.dumps({"messages": SAID, "tools": "add, multiply"}), "line 2: `tools` must be a list of schemas"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": {}}]}',
            "line 2, message 1: its tool_calls must be a list of calls",
        ),
    ],
)
def test_a_bad_row_says_where_it_stands(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": SAID}) + f"\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_conversations(file)


def test_schemas_of_a_row_may_be_json_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": SAID, "tools": json.dumps(SCHEMAS)}) + "\n")
    assert read_conversations(file)[0]["tools"] == SCHEMAS


def test_messages_in_the_forms_of_others_are_read(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "What does "}, {"type": "text", "text": "tea cost?"}]}
    object_ = {"role": "tool", "content": {"price": 4.5}}
    thinks = {"role": "assistant", "content": "4.5", "reasoning": "tea is 4.5", "weight": 0}
    bare = [{"name": "f", "parameters": {}}]
    file = tmp_path / "rows.jsonl"
    row = {"messages": [parts, calling(("f", {})), object_, thinks]}
    file.write_text("".join(json.dumps({**row, "tools": tools}) + "\n" for tools in (bare, [])))
    first, second = read_conversations(file)
    assert [one["content"] for one in first["messages"]] == ["What does tea cost?", "", '{"price": 4.5}', "4.5"]
    assert first["messages"][3]["reasoning_content"] == "tea is 4.5"
    assert first["tools"] == [{"type": "function", "function": bare[0]}] and second["tools"] == []
    taught = Taught("qwen3", *first["messages"], schemas=first["tools"])
    assert len(taught.spans) == 1, "a weight of 0 is shown, and not learnt"


def test_calls_in_the_older_form_and_as_text_are_calls(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": "{}"}
    older = {"role": "assistant", "content": None, "function_call": call}
    text = {"role": "assistant", "tool_calls": json.dumps([{"type": "function", "function": call}])}
    schema = {"name": "f", "parameters": {}}
    file = tmp_path / "rows.jsonl"
    results = [{"role": "function", "name": "f", "content": "4"}, {"role": "tool", "content": "4"}]
    rows = [
        {"messages": [*SAID[:1], one, result], "functions": [schema]}
        for one, result in zip((older, text), results, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for read in read_conversations(file):
        assert read["messages"][1]["tool_calls"] == [{"type": "function", "function": call}]
        assert read["messages"][2]["role"] == "tool" and read["tools"] == [{"type": "function", "function": schema}]


def test_what_a_table_fills_in_is_not_taught(tmp_path: Path) -> None:
    calls = [calling(("buy", {"product": "tea"})), calling(("go", {"city": "Oslo"}))]
    table = pyarrow.Table.from_pylist([{"messages": [*SAID[:1], call]} for call in calls])
    assert table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    read = read_conversations(tmp_path / "rows.parquet")
    said = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in read]
    assert said == [{"product": "tea"}, {"city": "Oslo"}]


def test_prompt_and_completion_are_a_conversation_too_whose_prompt_is_only_shown(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": SAID[:1], "completion": SAID[1:]}) + "\n")
    (read,) = read_conversations(file)
    assert [m["role"] for m in read["messages"]] == ["user", "assistant"] and read["n_prompt"] == 1
    (tmp_path / "test.jsonl").write_text(json.dumps({"messages": SAID * 2}) + "\n")
    file.rename(tmp_path / "train.jsonl")
    assert [len(read_conversations(tmp_path, split)[0]["messages"]) for split in ("train", "test")] == [2, 4]


def test_a_mixture_gives_the_conversations_of_its_tasks_by_weight_with_their_opening(tmp_path: Path) -> None:
    for name, n in (("sums", 6), ("words", 4)):
        words = [{"role": "user", "content": name}, {"role": "assistant", "content": "ok"}]
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": words}) + "\n") * n)
    mixture = tmp_path / "both.yaml"
    tasks = f"tasks:\n- data: {tmp_path}/sums.jsonl\n  weight: 2\n- data: {tmp_path}/words.jsonl\n"
    mixture.write_text("system_prompt: Be short.\n" + tasks)
    rows = [[message["content"] for message in row["messages"]] for row in read_conversations(mixture)]
    assert sorted(rows) == [["Be short.", "sums", "ok"]] * 6 + [["Be short.", "words", "ok"]] * 3
    pair = {"prompt": words[:1], "completion": words[1:]}
    (tmp_path / "words.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    read = {(row["messages"][1]["content"], row["n_prompt"]) for row in read_conversations(mixture)}
    assert read == {("sums", 1), ("words", 2)}, "the opening is not learnt either"
    mixture.write_text(tasks + "  tools: [add]\n")
    with pytest.raises(DataError, match=r"words\.jsonl.*`toolgrpo sft`"):
        read_conversations(mixture)
