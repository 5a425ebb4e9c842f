"""Rows from every kind of source, and what is said about bad ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

from toolgrpo.data import BadRows, load_tasks
from toolgrpo.data.load import held_out_split, places_of
from toolgrpo.data.rows import rows_and_reasons
from toolgrpo.data.table import as_dataset, check_prompts
from toolgrpo.errors import DataError, RewardError
from toolgrpo.rewards import check_gold, get_reward, refused_rows

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD = {"prompt": "2+2?", "answer": "4"}


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_row_comes_back_with_every_value_as_it_was(tmp_path: Path) -> None:
    rows = [
        {**GOOD, "level": 1, "tags": ["a"], "meta": {"k": 1}, "mixed": 1, "rate": 0.5, "flag": True},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": 5,
         "level": 2, "tags": [], "meta": {"other": [1, "x"]}, "mixed": "one", "rate": 1.5, "flag": False, "late": [2**40, "x"]},
    ]  # fmt: skip
    first, second = load_tasks(jsonl(tmp_path / "d.jsonl", *rows))
    assert first == {**rows[0], "prompt": [{"role": "user", "content": "2+2?"}], "late": None}
    assert second == {**rows[1], "answer": "5"}


def test_an_integer_that_datasets_cannot_read_back_is_an_error(tmp_path: Path) -> None:
    for n in (2**70, {"k": [2**64]}):
        path = jsonl(tmp_path / "d.jsonl", GOOD, {**GOOD, "n": n}, {**GOOD, "n": 2**64 - 1, "answer": 2**70})
        with pytest.raises(DataError, match=r"d\.jsonl, line 2: .* an integer of more than 64 bits; write it as text"):
            load_tasks(path)
        first, last = load_tasks(path, on_bad_row=lambda said: None)
        assert first["n"] is None and (last["n"], last["answer"]) == (2**64 - 1, str(2**70))
    assert load_tasks(jsonl(tmp_path / "d.jsonl", {**GOOD, "n": {"k": "9" * 30}}))[0]["n"] == {"k": "9" * 30}


UNWRITABLE = [  # the JSON of values that no file takes, and what is said of them
    *((json.dumps(text), "broken character") for text in ("\ud800", "caf\udce9")),
    *(("9" * n, "an integer of more than 4300 digits") for n in (4301, 100_000)),
    *(("[" * n + "]" * n, "nested too deeply") for n in (101, 900, 100_000)),
]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_whatever_cannot_be_written_down_is_one_sentence_in_any_column(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"d.{suffix}"
    for value, problem in UNWRITABLE:
        said_of(path, f'"prompt": {value}, "answer": "1"', problem)
        said_of(path, f'"prompt": "q", "answer": {value}', problem)
        for held in (value, f'[{{"k": {value}}}]'):
            said_of(path, f'"prompt": "q", "answer": "1", "level": {held}', problem)
        if value.startswith('"'):
            said_of(path, f'"prompt": "q", {value}: 1', problem)


def said_of(path: Path, row: str, problem: str) -> None:
    path.write_text(f"{{{row}}}\n" if path.suffix == ".jsonl" else f"[{{{row}}}]")
    with pytest.raises(DataError, match=problem) as caught:
        load_tasks(path)
    assert len(str(caught.value)) < 400 + len(str(path)) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "a\ud800": 1}, r"'a.ud800'"),
        ({"prompt": "q", 5: 1}, "the column name 5 must be text"),
        ({"prompt": "q", "n": 10**5000}, r"'n'.*JSON"),
        ({"prompt": "q", "n": {("a", "b"): 1}}, r"'n'.*JSON"),
        ({"prompt": "q", "answer": 10**5000}, "the answer cannot be written as JSON"),
        ({"prompt": [10**5000]}, "the prompt cannot be written as JSON"),
    ],
)
def test_rows_from_python_are_looked_at_as_those_of_files(row: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        as_dataset([row], "rows")


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a, b", "answer": "1"}, {"prompt": "c\nd", "answer": "2"}]
    jsonl(tmp_path / "d.jsonl", *rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "d.csv").write_text('prompt,answer\n"a, b",1\n"c\nd",2\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    wanted = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    for suffix in ("jsonl", "json", "csv", "parquet"):
        assert list(load_tasks(tmp_path / f"d.{suffix}")) == wanted, suffix
    table = Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    DatasetDict(train=table.select([0]), test=table).save_to_disk(tmp_path / "splits")
    assert list(load_tasks(tmp_path / "saved")) == wanted == list(load_tasks(tmp_path / "splits", split="test"))
    load_from_disk(str(tmp_path / "saved")).map(lambda row: {"answer": "9"})  # leaves a cache in the folder
    assert list(load_tasks(tmp_path / "saved")) == wanted
    assert list(load_tasks(tmp_path / "splits")) == wanted[:1] and held_out_split(str(tmp_path / "splits")) == "test"
    assert load_tasks(tmp_path / "d.jsonl", limit=1).num_rows == 1


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", GOOD, GOOD)
    jsonl(tmp_path / "test-00000-of-00001.jsonl", GOOD)
    assert [len(load_tasks(tmp_path, split=split)) for split in ("train", "test")] == [2, 1]
    with pytest.raises(DataError, match=r"no split 'heldout'.*it holds test-00000-of-00001.jsonl, train.jsonl"):
        load_tasks(tmp_path, split="heldout")
    with pytest.raises(DataError, match=r"'heldout'.*--eval_dataset_id_or_path"):
        load_tasks(tmp_path / "train.jsonl", split="heldout")


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["train.jsonl", "train_small.jsonl", "train-old.jsonl"], 1),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train_small.jsonl"], 2),
        ([f"train-0000{n}-of-00002-a3ecf92756993583.jsonl" for n in range(2)], 2),
        (["train_small.jsonl", "test.jsonl"], 1),
        (["train_small.jsonl", "train_old.jsonl"], "several files"),
        (["train.jsonl", "train.ndjson"], "several files for the split 'train': train.jsonl, train.ndjson"),
    ],
)
def test_what_only_begins_like_a_split_is_not_read_beside_it(
    tmp_path: Path, names: list[str], taken: int | str
) -> None:
    for name in names:
        jsonl(tmp_path / name, GOOD)
    if isinstance(taken, int):
        assert len(load_tasks(tmp_path)) == taken
    else:
        with pytest.raises(DataError, match=taken):
            load_tasks(tmp_path)


def test_a_folder_in_an_original_format(tmp_path: Path) -> None:
    """As a clone of the hub's repository has it: a folder for each configuration."""
    for config in ("main", "socratic"):
        jsonl(tmp_path / config / "train.jsonl", {"question": "1+1?", "answer": "1+1=2\n#### 2"})
    assert load_tasks(f"gsm8k:{tmp_path / 'main'}")[0]["answer"] == "2"
    with pytest.raises(DataError, match="'train'"):
        load_tasks(f"gsm8k:{tmp_path}")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "it is not valid JSON: .* at column 1"),
        ("[1]", "a row must be an object .* this is a list"),
        ({"question": "x", "answer": "1"}, "it has no 'prompt'; its columns are question, answer"),
        ({"prompt": "  ", "answer": "1"}, "the prompt is empty"),
        ({"prompt": [], "answer": "1"}, "empty list of messages"),
        ({"prompt": 3, "answer": "1"}, "must be text or a list of messages, not int '3'"),
        ({"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}, "has the role 'robot'"),
        ({"prompt": [{"role": "user", "content": [1]}], "answer": "1"}, "must be text, not list"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "ends with an assistant message"),
        ({"prompt": "x", "answer": None}, "must be text or a number, not null"),
        ({"prompt": "x", "answer": ""}, "the answer is empty"),
        ({"prompt": "x"}, "it has no 'answer', although the rows before it have one"),
        ({"prompt": "\ud800", "answer": "1"}, "lone surrogate"),
        ({"prompt": "x", "answer": "1", "user_turns": "y"}, "'user_turns' must be a list of the user's messages"),
        ({"prompt": "x", "answer": "1", "user_turns": ["y", " "]}, "entry 2 of the column 'user_turns' must be text"),
        ({"prompt": "x", "answer": "1", "completions": 1}, "'completions' is taken by the trainer"),
        ({"prompt": "x", "answer": "1", "image": "cat.png"}, "'image', and episodes are text"),
        ('{"prompt": "' + "x" * 10_000_000 + '"}', "the line has 10,000,0.. bytes"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_fault_or_counted(tmp_path: Path, row: Any, problem: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", GOOD, "", row, GOOD)
    with pytest.raises(DataError, match=f"d.jsonl, line 3: .*{problem}.*--skip_bad_rows"):
        load_tasks(path)
    bad = BadRows()
    assert len(load_tasks(path, on_bad_row=bad.add)) == 2
    assert bad.count == 1 and "1 bad row was skipped:\n" in bad.summary() and "line 3" in bad.summary()


def test_a_file_whose_prompts_have_another_name_is_answered_with_that(tmp_path: Path) -> None:
    asked = {"id": 1, "Question": "1+1?", "answer": "2"}
    with pytest.raises(DataError, match=r"line 1: .*'prompt'.*'Question'.*'prompt'"):
        load_tasks(jsonl(tmp_path / "d.jsonl", asked, asked))
    bad = BadRows()
    assert len(load_tasks(jsonl(tmp_path / "f.jsonl", asked, GOOD), on_bad_row=bad.add)) == 1 and bad.count == 1
    without = jsonl(tmp_path / "e.jsonl", {"prompt": "x"}, {"prompt": "y", "answer": "1"})
    with pytest.raises(DataError, match="line 2: it has an 'answer', although the rows before it have none"):
        load_tasks(without)


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("blank.jsonl", "\n\n", "blank.jsonl"),
        ("object.json", "{}", "object.json"),
        ("ragged.csv", "prompt,answer\na\n", "line 2: .* 2 "),
        ("twice.jsonl", '{"prompt": "q", "answer": "1", "answer": "2"}', "line 1: .* the key 'answer' appears twice"),
        ("twice.json", '[{"prompt": "q", "prompt": "r"}]', "the key 'prompt' appears twice"),
        ("semicolons.csv", "prompt;answer\nq;1\n", r"line 1: .*'prompt;answer'; columns are separated by commas"),
        ("twice.csv", "prompt,answer,answer\nq,1,2\n", r"line 1: .*'answer'"),
        ("reasoning_gym:", None, "reasoning_gym:NAME"),
        ("reasoning_gym:basic_arithmetic:many", None, "reasoning_gym:NAME"),
    ],
)
def test_a_source_that_cannot_be_read_is_told(
    name: str, content: str | None, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are missing, empty, binary, of another kind or without rows: tests/commands/test_bad_input.py."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(DataError, match=names):
        load_tasks(name)


def test_a_split_or_a_limit_that_there_is_not() -> None:
    with pytest.raises(DataError, match="'dev'"):
        load_tasks("gsm8k", split="dev")
    with pytest.raises(DataError, match="limit of rows"):
        load_tasks("arithmetic", limit=0)


def test_gsm8k_rows_have_the_answers_of_their_solutions() -> None:
    rows = load_tasks(f"gsm8k:{REPOSITORY / 'recipes/data/gsm8k_30.jsonl'}")
    assert len(rows) == 30 == check_gold(rows, get_reward("gsm8k"))
    assert all(row["answer"] == row["solution"].rpartition("####")[2].strip().replace(",", "") for row in rows)


def test_aime_rows_of_both_shapes(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "aime.jsonl",
        {"id": 1, "problem": "p", "solution": "s", "answer": "073", "url": "u"},
        {"input": "q", "output": 204},
    )
    rows = load_tasks(f"aime:{path}")
    assert [row["answer"] for row in rows] == ["73", "204"] and check_gold(rows, get_reward("math")) == 2
    with pytest.raises(DataError, match=r"line 1: .*0 .*999.*'1000'"):
        load_tasks(f"aime:{jsonl(tmp_path / 'bad.jsonl', {'problem': 'p', 'answer': 1000})}")


def test_reasoning_gym_tasks_with_grids_or_many_right_answers_load_and_are_scored() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    assert len(load_tasks("reasoning_gym:graph_color:3")) == 3
    for task in ("rearc", "arc_agi"):
        (row,) = load_tasks(f"reasoning_gym:{task}:1")
        said = [{"role": "assistant", "content": f"<answer>{row['answer']}</answer>"}]
        columns = {"gym_task": [task], "gym_entry": [row["gym_entry"]]}
        assert get_reward("reasoning_gym")(completions=[said], answer=[row["answer"]], **columns) == [1.0]


def test_reasoning_gym_tasks_hold_out_other_questions() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    train = load_tasks("reasoning_gym:basic_arithmetic:20:1")
    heldout = load_tasks("reasoning_gym:basic_arithmetic:20:1", split="heldout")
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in heldout}
    assert check_gold(train, get_reward("reasoning_gym")) == 20
    with pytest.raises(DataError, match=r"'basic_arithmetics'.*basic_arithmetic"):
        load_tasks("reasoning_gym:basic_arithmetics")


def test_an_answer_that_its_own_reward_refuses_is_found() -> None:
    rows = [{"prompt": "x", "answer": "2 or 3"}, {"prompt": "x", "answer": "2 or 3/0"}]
    assert check_gold(rows[:1], get_reward("gsm8k")) == 1
    with pytest.raises(RewardError, match=r"row 2.*'2 or 3/0'"):
        check_gold(rows, get_reward("gsm8k"))
    with pytest.raises(DataError, match=r"row 2: its own answer ' ' scores 0"):
        check_gold([*rows[:1], {"prompt": "x", "answer": " "}], get_reward("exact_match"))
    assert check_gold(rows, get_reward("tool_use")) is None
    assert check_gold([*rows[:1], {"prompt": "x", "answer": None}], get_reward("gsm8k")) == 1


def test_rows_that_would_end_a_training_are_found_before_it() -> None:
    calls = Dataset.from_dict({"gold_calls": ["[]", "f(a=1)", None], "answer": ["1", "2", "five"]})
    assert [list(refused_rows(calls, get_reward(name))) for name in ("gold_calls", "gsm8k")] == [[1], [2]]


def test_where_each_row_stands_is_found_again(tmp_path: Path) -> None:
    """In the order of the rows that were loaded: bad ones are passed over, a mixture is in the order of its seed."""
    for name in "ab":
        jsonl(
            tmp_path / f"{name}.jsonl",
            *({**GOOD, "n": f"{name}.jsonl, line {line}", "x": {"share": line / 7}} for line in range(1, 5)),
            "no JSON",
            "",
        )
    (tmp_path / "m.yaml").write_text("tasks:\n" + "".join(f"- data: {tmp_path / name}.jsonl\n" for name in "ab"))
    for spec, limit in (("a.jsonl", 3), ("m.yaml", None), ("m.yaml", 5)):
        where: dict[str, Any] = {"split": "train", "limit": limit, "seed": 3}
        rows = load_tasks(tmp_path / spec, on_bad_row=lambda _: None, **where)
        assert [f"{tmp_path}/{row['n']}" for row in rows] == [*places_of(rows, range(len(rows))).values()]


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({0: "x"}, "a.jsonl, line 1: x"),
        ({0: "x", 1: "x", 3: "y", 4: "x", 6: "x", 7: "x"}, "a.jsonl, line 1 to 2, 5, 7 to 8: x; a.jsonl, line 4: y"),
        (dict.fromkeys(range(1000), "x"), "a.jsonl, line 1 to 1000: x"),
        ({n: str(n) for n in range(12)}, "a.jsonl, line 10: 9; a.jsonl, line 11 to 12: for other reasons"),
        (dict.fromkeys(range(0, 1000, 2), "x"), "199, and 400 more: x"),
    ],
)
def test_every_refused_row_is_told_at_once(refused: dict[int, str], said: str) -> None:
    told = rows_and_reasons(refused, lambda number: f"a.jsonl, line {number + 1}")
    assert told.endswith(said) and len(told) < 1000
    assert rows_and_reasons({0: "x", 2: "x"}, "rows[{}]".format) == "rows[0, 2]: x"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_is_named_by_file_and_line_in_every_selection(tmp_path: Path, kind: str, mixed: bool) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in (1, 2, 2, 3)]
    text = {
        "jsonl": "\n" + "".join(json.dumps(row) + "\n" for row in rows),
        "csv": "prompt,answer\n" + "".join(",".join(row.values()) + "\n" for row in rows),
        "json": json.dumps(rows),
    }
    spec = file = tmp_path / f"rows.{kind}"
    file.write_text(text[kind])
    if mixed:
        spec = tmp_path / "mixture.yaml"
        spec.write_text(f"system_prompt: Be short.\ntasks: [{{data: {file}}}]\n")
    loaded = load_tasks(spec, system_prompt="Answer.")
    places = [f"{file}, {'item' if kind == 'json' else 'line'} {n + (kind != 'json')}" for n in (1, 2, 3, 4)]
    assert sorted(places_of(loaded, range(4)).values()) == places, "the same rows stand at different lines"
    number = next(n for n, row in enumerate(loaded) if row["answer"] == "4")
    for selection in (loaded.select([number, 0]), loaded.select(range(number, number + 1))):
        assert places_of(selection, [0]) == {0: places[3]} == {0: places_of(loaded, [number])[number]}
    assert places_of([dict(row) for row in loaded], [2]) == {2: "row 3"}


def test_cells_of_a_table_are_read_as_what_their_columns_mean(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    for text, meant in (("", None), ("true", True), ("False", False)):
        file.write_text(f'prompt,enable_thinking,expected_tools\nq,{text},"[""add""]"\nr,,\n')
        first, second = load_tasks(file)
        assert first["enable_thinking"] is meant and first["expected_tools"] == ["add"]
        assert second["enable_thinking"] is None and second["expected_tools"] is None
    for cell in ("yes", "2"):
        file.write_text(f"prompt,enable_thinking,expected_tools\nq,{cell},\n")
        with pytest.raises(DataError, match=r"rows\.csv.*the column 'enable_thinking' must be"):
            load_tasks(file)


def test_numbers_and_lists_of_numpy_in_a_row_are_those_of_python() -> None:
    values = {
        "target": numpy.int64(7),
        "flag": numpy.bool_(False),
        "nums": numpy.arange(2000),
        "args": {"a": numpy.float32(0.5)},
    }
    asked = numpy.array([{"role": "user", "content": "q"}], dtype=object)
    (row,) = as_dataset([{"prompt": asked, "answer": numpy.int64(5), **values}], "rows")
    assert row["prompt"] == [{"role": "user", "content": "q"}] and row["answer"] == "5"
    assert (row["target"], row["flag"], row["nums"], row["args"]) == (7, False, list(range(2000)), {"a": 0.5})


SAID: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("file", [True, False])
def test_messages_and_calls_that_are_text_are_read_or_refused(tmp_path: Path, file: bool) -> None:
    def rows(prompt: Any) -> Any:
        row = {"prompt": prompt}
        return load_tasks(jsonl(tmp_path / "d.jsonl", row)) if file else as_dataset([row], "rows")

    assert rows(json.dumps(SAID))[0]["prompt"] == SAID
    shown: list[dict[str, Any]] = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
        *SAID,
    ]
    assert rows(shown)[0]["prompt"][1]["tool_calls"] == [CALL]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rows(parts)[0]["prompt"] == [{"role": "user", "content": "ab"}]
    for prompt, problem in (
        (str(SAID), "messages written as text"),
        ([{**shown[1], "tool_calls": CALL}], "a list of calls"),
    ):
        with pytest.raises(DataError, match=problem):
            rows(prompt)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a"}, "rows has no column 'prompt'; rename 'question' to 'prompt'"),
        ({"messages": SAID}, "conversations: train on them with `toolgrpo sft`"),
        ({"prompt": [{"from": "human", "value": "a"}]}, "rows: row 0: message 1 of the prompt has the role None"),
        ({"prompt": ""}, "row 0: the prompt is empty"),
        ({"prompt": json.dumps(SAID)}, "row 0: a list in the prompt is written as JSON text"),
        ({"prompt": [{"role": "assistant", "tool_calls": json.dumps([CALL])}, *SAID]}, "row 0: a list in the prompt"),
        (
            {"prompt": [*SAID, {"role": "assistant", "content": "a"}]},
            "row 0: the prompt ends with an assistant message",
        ),
    ],
)
def test_a_table_that_somebody_else_made_is_looked_at_too(row: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        check_prompts(Dataset.from_list([row]), "rows")
    check_prompts(Dataset.from_list([{"prompt": SAID}, {"prompt": [{"role": "user", "content": "b"}]}]), "rows")


def test_conversations_are_no_rows_and_are_sent_to_sft(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DataError, match=r"line 1: it has no 'prompt'.*conversations: .*toolgrpo sft.*as 'prompt'$"):
        load_tasks(jsonl(tmp_path / "d.jsonl", {"messages": said}))


def test_messages_and_lists_are_json_in_a_cell(tmp_path: Path) -> None:
    file, said = tmp_path / "rows.csv", [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi?"}]
    cells = [[json.dumps(said), '["add"]', '["and?"]'], ["[1, 2]: what is it?", "", ""], ["[1, 2]", "", ""]]
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["prompt", "tools", "user_turns"], *cells])
    first, *others = load_tasks(file)
    assert (first["prompt"], first["tools"], first["user_turns"]) == (said, ["add"], ["and?"])
    assert [row["prompt"][0]["content"] for row in others] == [cells[1][0], "[1, 2]"] and others[0]["tools"] is None


def test_a_folder_of_rows_may_hold_the_runs_that_were_trained_on_them(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "output"):
        jsonl(folder / "heldout.jsonl", {"prompt": folder.name})
    (tmp_path / "output" / "run.yaml").write_text("")
    (row,) = load_tasks(tmp_path, split="heldout")
    assert row["prompt"][0]["content"] == tmp_path.name
