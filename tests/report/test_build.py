"""The report as a file: what is in it, what it costs, and that nothing in a recording breaks it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_run import record_run
from toolgrpo.commands.main import main
from toolgrpo.errors import ConfigError
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.observe.records import read_episodes
from toolgrpo.report.build import build_report, run_findings, step_sums
from toolgrpo.report.episode_data import TEXT_LIMIT, bounded_prompt
from toolgrpo.report.files import TokensByStep, step_lines
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode


class Page(HTMLParser):
    """The blocks of a page as a browser finds them."""

    def __init__(self, *runs: Path, to: Path | None = None, **options: Any) -> None:
        super().__init__()
        self.built = build_report(runs, to, **options)
        self.blocks: dict[str, str] = {}
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self.policy = ""
        self.tags: list[str] = []
        self.feed(self.built.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._given = dict(attrs)
        if self._given.get("http-equiv") == "Content-Security-Policy":
            self.policy = self._given["content"] or ""

    def handle_data(self, data: str) -> None:
        if not data.strip() or not self.tags:
            return
        if self.tags[-1] == "script" and self._given.get("type") == "text/plain":
            self.blocks[self._given["id"] or ""] = data
        elif self.tags[-1] in self.code:
            self.code[self.tags[-1]].append(data)

    def value(self, name: str | int) -> Any:
        if not isinstance(name, str):
            return self.value(f"c{name // 1000}")[name % 1000]
        return json.loads(zlib.decompress(base64.b64decode(self.blocks[name])))

    def lines(self, kind: str) -> list[Any]:
        """Return the lines of a kind, in the order in which the page reads them."""
        blocks = (name for name in self.blocks if name.startswith("lines"))
        return [line for name in blocks for line in self.value(name) if line["kind"] == kind]

    def steps_with_episodes(self) -> list[dict[str, Any]]:
        return [{**line["sums"], **line} for line in self.lines("batch") if "rows" in line]


def write_lines(file: Path, lines: Iterable[object]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_everything_that_was_recorded_is_in_the_page(run: Path, tmp_path: Path) -> None:
    page = Page(run, to=tmp_path / "report.html")
    steps = page.steps_with_episodes()
    recorded = [*read_episodes(run / "episodes.jsonl"), *read_episodes(run / "heldout.jsonl")]
    assert page.built.n_episodes == page.built.n_shown == len(recorded)
    assert sum(len(step["rows"]["n"]) for step in steps) == len(recorded)
    by_place = {}
    for chunk in steps:
        texts, tokens = page.value(chunk["texts"]), page.value(chunk["tokens"])
        for episode, own in zip(texts["episodes"], tokens["episodes"], strict=True):
            by_place[chunk["mode"], chunk["label"], chunk["step"], episode["n"]] = (episode, own, texts)
    for record in recorded:
        episode, own, texts = by_place[record["mode"], record.get("label"), record["step"], record["episode"]]
        assert episode["r"] == record["reward_given"] and episode["ok"] == record["success"]
        assert episode.get("a") == record["advantage"] and episode["stop"] == record["stop_reason"]
        of_turns = record.get("turn_advantages") or [None] * len(episode["turns"])
        assert [turn.get("ta") for turn in episode["turns"]] == of_turns
        assert [turn["c"] for turn in episode["turns"]] == [turn["content"] for turn in record["turns"]]
        prompt = texts["prompts"][record["prompt_id"]]
        assert (prompt["m"], prompt["row"], own["i"]) == (record["prompt"], record["row"], record["ids"])
        runs = [number % 2 for number, length in enumerate(own["m"]) for _ in range(length)]
        assert runs == record["mask"]
        assert own["l"] == [round(lp * 1000) for lp in record["logprobs"] if lp is not None]
    seen = [own for _, own, _ in by_place.values() if "d" in own]
    assert len(seen) == 3 and all(len(own["d"]) == len(own["l"]) == len(own["h"]) == len(own["k"]) for own in seen)
    assert {one["label"] for one in page.lines("measured")} == {"before (greedy)", "after (greedy)"}
    dead = next(one for one in steps if one["mode"] == "train" and one["step"] == 0)
    assert dead["groups"] == [1, 1, 0, 0] and dead["causes"] == {"raised": 1}


def test_an_episode_has_the_prompt_that_its_own_environment_made(tmp_path: Path) -> None:
    tools = ScriptedTools({}, observation=lambda row: str(row["said"]))
    played = [
        run_episode(ScriptedEngine([ByteChat.say("3")]), tools, question="q", row={"said": said})
        for said in (" (a)", " (a)", " (b)")
    ]
    recorder = EpisodeRecorder(tmp_path / "episodes.jsonl")
    recorder.batch_done(RolloutBatch(episodes=tuple(Scored({"prompt": "q"}, one) for one in played), group_size=3))
    recorder.close()
    page = Page(tmp_path)
    (chunk,) = page.steps_with_episodes()
    texts = page.value(chunk["texts"])
    (shared,) = [prompt["m"][0]["content"] for prompt in texts["prompts"].values()]
    own = [episode["m"][0]["content"] for episode in texts["episodes"] if "m" in episode]
    assert (shared, own) == ("q (a)", ["q (b)"])


def test_a_finding_quotes_what_a_failing_tool_answered_and_leads_to_such_calls() -> None:
    metrics = {"reward": 0.1, "tools/order/calls": 20, "tools/order/failures": 15, "tools/error/raised": 15}
    lines = [{"kind": "step", "step": step, "metrics": metrics} for step in range(3)]
    said = Counter({("raised", "LookupError: there is no order 15"): 9, ("timeout", "too slow"): 6})
    (found,) = run_findings(lines, {"order": said, "find": Counter({("raised", "another"): 99})})
    assert found["sentence"].endswith('(9 times in the run) it is answered "LookupError: there is no order 15"')
    assert found["filter"] == {"from": 1, "to": 3, "ready": "", "tool": "order", "cause": "raised"}


def test_names_of_tools_that_were_made_up_are_one_row(run: Path) -> None:
    (first, *others) = [one for one in read_episodes(run / "episodes.jsonl") if one["turns"][0]["results"]]
    (result,) = first["turns"][0]["results"]
    first["turns"][0]["results"] = [{**result, "name": f"made up {n}", "error": "unknown_tool"} for n in range(3)]
    tools = step_sums([first, *others[:1]])["tools"]
    assert set(tools) == {"add", "unknown"} and tools["unknown"]["n"] == 3


def test_the_median_of_a_tool_is_that_of_all_its_calls(run: Path, tmp_path: Path) -> None:
    """A mean of the medians of steps would be 3.67."""
    folder = shutil.copytree(run, tmp_path / "run")
    record = next(one for one in read_episodes(folder / "episodes.jsonl") if one["turns"][0]["results"])
    (result,) = record["turns"][0]["results"]
    with (folder / "episodes.jsonl").open("w") as file:
        for step, took in ((0, (1.0, 1.0, 9.0)), (1, (2.0, 9.0, 9.0)), (2, (1.0, 1.0, 1.0))):
            results = [{**result, "name": "slow", "duration_s": seconds} for seconds in took]
            turns = [{**record["turns"][0], "results": results}, *record["turns"][1:]]
            file.write(json.dumps({**record, "step": step, "turns": turns}) + "\n")
    (index,) = Page(folder).value("index")["runs"]
    assert index["medians"]["slow"] == 1.0


def test_a_resume_makes_void_what_an_earlier_process_did_after_it(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    lines: list[dict[str, Any]] = []
    for first, last, process in ((0, 4, "a"), (3, 6, "b"), (2, 5, "c")):
        lines.append({"kind": "run", "resumed": first or None, "process": process})
        for step in range(first, last):
            lines.append({"kind": "step", "step": step, "metrics": {"reward": 0.0}, "time": ord(process)})
            lines.append({"kind": "event", "step": step, "what": "warning", "text": f"{process}{step}"})
    write_lines(folder / "steps.jsonl", lines)
    page = Page(folder)
    assert [f"{chr(one['time'])}{one['step']}" for one in page.lines("step")] == ["a0", "a1", "c2", "c3", "c4"]
    assert [one["text"] for one in page.lines("event")] == ["a0", "a1", "resumed after 2 steps", "c2", "c3", "c4"]
    assert page.value("index")["runs"][0]["facts"]["process"] == "c"


def test_what_a_resumed_run_saw_of_tokens_again_stands_for_the_steps_it_repeated(run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / "tokens.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    again = [{**line, "ids_crc32": number} for number, part in enumerate((lines, lines[1:])) for line in part]
    folder = shutil.copytree(run, tmp_path / "run")
    write_lines(folder / "tokens.jsonl", again)
    seen = TokensByStep(folder)
    assert [[line["ids_crc32"] for line in seen.of_step(step).values()] for step in range(3)] == [[0], [1], [1]]


def test_a_measurement_that_a_resume_made_void_is_not_shown(tmp_path: Path) -> None:
    measured = {"kind": "measured", "n": 4, "label": "x", "reward": 0.5}
    lines = [
        {"kind": "run", "resumed": None},
        *({**measured, "step": step, "successes": 1} for step in (0, 10, 15)),
        {"kind": "run", "resumed": 10},
        *({**measured, "step": step, "successes": 2} for step in (15, 20)),
    ]
    write_lines(tmp_path / "steps.jsonl", lines)
    found = [(line["step"], line["successes"]) for line in step_lines(tmp_path) if line["kind"] == "measured"]
    assert found == [(0, 1), (10, 1), (15, 2), (20, 2)]


def test_held_out_rows_that_several_processes_measured_are_one_set(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    shutil.copy(folder / "heldout.jsonl", folder / "heldout.rank1.jsonl")
    sets = [one for one in Page(folder).steps_with_episodes() if one["mode"] == "heldout"]
    assert [(one["label"], one["n"]) for one in sets] == [("before (greedy)", 4), ("after (greedy)", 4)]
    assert all(sorted(one["rows"]["n"]) == sorted(set(one["rows"]["n"])) for one in sets)


def test_an_episode_that_could_not_be_scored_is_no_failure(run: Path) -> None:
    group = [one for one in read_episodes(run / "episodes.jsonl") if (one["step"], one["group"]) == (1, 8)]
    alike = [{**one, "success": True, "reward_given": 1.0, "advantage": 0.0} for one in group]
    alike[2].update(success=None, reward_given=None)
    sums = step_sums(alike)
    assert (sums["n"], sums["scored"], sums["ok"], sums["r"], sums["groups"]) == (4, 3, 3, 1.0, [0, 0, 1, 0])
    other = [{**one, "group": 99, "reward_given": 0.0} for one in alike]
    both = step_sums(alike + other)
    assert both["sd"] / both["rewarded"] ** 0.5 == pytest.approx(0.5, abs=1e-4), "episodes of a question are alike"
    alike[0]["success"] = False
    assert step_sums(alike)["groups"] == [0, 0, 0, 1], "paid alike, for success and for failure"
    teaching = [{**one, "advantage": 0.43} for one in alike]
    assert step_sums(teaching)["groups"] == [1, 0, 0, 0], "advantages may be made of parts that differ"
    dropped = [{**one, "group": 99, "success": None, "reward_given": None, "advantage": None} for one in alike]
    sums = step_sums(alike + dropped)
    assert sums["sd"] is None, "one question has no interval"
    assert (sums["groups"], sums["dropped_groups"]) == ([0, 0, 0, 1], 1), "no question of a success's interval"
    waits = [
        {**one, "timings": {**one["timings"], "rollout_s": float(s)}}
        for one, s in zip(alike, (1, 4, 2, 3), strict=True)
    ]
    assert step_sums(waits)["rollout_s"] == 4.0, "of the slowest process"


def test_a_number_that_a_browser_would_round_is_text() -> None:
    prompt = bounded_prompt({"prompt": [], "row": {"answer": 2**53 + 1, "other": -7, "n": [12345678901234567890]}})
    assert prompt["row"] == {"answer": "9007199254740993", "other": -7, "n": ["12345678901234567890"]}


def test_the_page_may_run_its_own_script_and_nothing_else(run: Path, tmp_path: Path) -> None:
    page = Page(run, to=tmp_path / "report.html")
    (program,), (style,) = page.code["script"], page.code["style"]
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert (rules["script-src"], rules["style-src"]) == (hashed(program), hashed(style))
    assert "connect-src" not in rules, "a page that is not live needs no network"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", program)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)


def test_the_name_of_a_folder_is_text(tmp_path: Path) -> None:
    page = Page(record_run(tmp_path / "<script>alert(1)<", steps=1))
    assert len(page.code["script"]) == 1 and page.tags.count("script") == 1 + len(page.blocks)


def test_a_long_run_is_shown_in_part_with_all_of_its_charts(tmp_path: Path) -> None:
    page = Page(record_run(tmp_path, steps=10), most_episodes=24)
    shown = [chunk["step"] for chunk in page.steps_with_episodes() if chunk["mode"] == "train"]
    assert shown[0] == 0 and shown[-1] == 9 and len(shown) == 3
    assert page.built.n_shown < page.built.n_episodes == 84
    assert [one["sums"]["step"] for one in page.lines("batch") if one["sums"]["mode"] == "train"] == list(range(10))


def test_texts_that_are_too_long_are_cut_in_the_middle(tmp_path: Path) -> None:
    page = Page(record_run(tmp_path, steps=1, said=lambda text: f"{text}{'x' * 1_000_000}"))
    assert page.built.n_bytes < 2_000_000
    chunk = next(one for one in page.steps_with_episodes() if one["mode"] == "train")
    content = page.value(chunk["texts"])["episodes"][1]["turns"][0]["c"]
    assert content.startswith("The answer is 9.xxx") and "characters left out here" in content
    assert len(content) < TEXT_LIMIT + 200


def test_what_cannot_be_reported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="holds no recording"):
        build_report([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    run = record_run(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="cannot be written to"):
        build_report([run], Path("/proc/nowhere/report.html"))
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert (run / "report.html").as_uri() in said and "12 episodes" in said
    assert not list(run.glob("*.half"))
