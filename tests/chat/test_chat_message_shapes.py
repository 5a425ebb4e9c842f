"""Messages in the shape that a family's template takes; no template here."""

from __future__ import annotations

from typing import Any

from tests.support.chat_samples import LOOK_UP, calling
from toolgrpo.chat.message_shapes import one_call_each, results_inside, tools_as_text, with_objects

QUESTION = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "Be brief."}


def result(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def test_arguments_become_objects_and_reasoning_goes_where_the_template_looks() -> None:
    function, broken = {"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{"}
    calls = [{"function": function}, {"function": broken}]
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls}
    (shaped,) = with_objects([said], "thinking")
    assert shaped["thinking"] == "hm" and "reasoning_content" not in shaped
    assert [call["function"]["arguments"] for call in shaped["tool_calls"]] == [{"a": 1}, "{"], "a broken quote stays"
    assert function["arguments"] == '{"a": 1}', "the row is not changed"
    answer = {"role": "assistant", "content": "x"}
    assert with_objects([{**answer, "tool_calls": []}], "reasoning_content") == [answer], "an empty list is no call"


def test_several_calls_become_messages_each_before_its_result() -> None:
    said = calling(("f", {}), ("g", {}), content="both")
    apart = one_call_each([QUESTION, said, result("1"), result("2"), QUESTION])
    assert [message["role"] for message in apart] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [m["content"] for m in apart[1:5]] == ["both", "1", "", "2"]
    assert [m["tool_calls"][0]["function"]["name"] for m in (apart[1], apart[3])] == ["f", "g"]


def test_results_go_into_the_message_they_answer_with_the_answer_behind_them() -> None:
    said = calling(("f", {}), ("g", {}))
    said["tool_calls"][1]["id"] = "c2"
    messages = [QUESTION, said, result("1", name="f"), result("2", tool_call_id="c2"), result("3")]
    answer = {"role": "assistant", "content": "done"}
    question, turn, following = results_inside([*messages, answer, QUESTION])
    assert (question, following) == (QUESTION, QUESTION)
    assert turn["content"] == "done" and turn["tool_calls"] == said["tool_calls"]
    responses = [(one["name"], one["response"]) for one in turn["tool_responses"]]
    assert responses == [("f", "1"), ("g", "2"), ("unknown", "3")]
    assert "tool_responses" not in said, "the row is not changed"


def test_tools_are_spelled_in_words_where_the_template_knows_none() -> None:
    said = calling(("look_up", {"key": "ü"}), content="well")
    spelled = tools_as_text([SYSTEM, QUESTION, said, result("1"), result("2"), QUESTION], [LOOK_UP], system=True)
    assert [message["role"] for message in spelled] == ["system", "user", "assistant", "user", "user"]
    told, _, called, answered, _ = (message["content"] for message in spelled)
    assert told.startswith("Be brief.\n\n# Tools") and '"look_up"' in told
    assert called == 'well\n<tool_call>\n{"name": "look_up", "arguments": {"key": "ü"}}\n</tool_call>'
    assert answered == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"


def test_without_a_system_role_the_words_stand_before_the_first_question() -> None:
    (only,) = tools_as_text([SYSTEM, QUESTION], [LOOK_UP], system=False)
    assert only["role"] == "user" and only["content"].startswith("Be brief.\n\n# Tools")
    assert only["content"].endswith("\n\nq")
    assert tools_as_text([SYSTEM, QUESTION], [], system=False) == [{"role": "user", "content": "Be brief.\n\nq"}]
    assert tools_as_text([QUESTION], [], system=False) == [QUESTION]
    answer = {"role": "assistant", "content": "a"}
    alone, _ = tools_as_text([SYSTEM, answer], [LOOK_UP], system=False)
    assert alone["role"] == "user" and alone["content"].startswith("Be brief.\n\n# Tools"), "no question comes first"
    assert tools_as_text([], [], system=False) == []
