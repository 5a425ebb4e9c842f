"""The recording of episodes: cut where a checkpoint was, whole after a kill, clear when the disk is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import StorageError
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path, token_texts
from toolgrpo.observe.records import prompt_id, read_episodes, read_vocabulary, row_of
from toolgrpo.report.files import batches
from toolgrpo.rollout import RolloutBegan
from toolgrpo.rollout.batch import Grade, Mode, RolloutBatch, RolloutTimes, Scored
from toolgrpo.testing import numbered_tokenizer


def episode(number: int) -> Trajectory:
    said = ({"role": "assistant", "content": "é" * 50},)
    whole = Trajectory((1,), (2, 3), (1, 1), (-0.5, -0.25), said, (), StopReason.FINISHED)
    return replace(whole, metadata={"episode": number})


def record(recorder: EpisodeRecorder, number: int, mode: Mode = "train", row: Mapping[str, str] | None = None) -> None:
    batch = RolloutBatch(episodes=(Scored(row or {"answer": "4"}, episode(number)),), step=number, mode=mode)
    recorder.batch_done(batch.graded([Grade({}, 1.0)], lambda one: True))


def numbers(path: Path) -> list[int]:
    return [line["metadata"]["episode"] for line in read_episodes(path)]


def test_a_recording_that_is_not_what_the_checkpoint_knew_is_told(tmp_path: Path) -> None:
    path = episodes_path(tmp_path, 0)
    recorder = EpisodeRecorder(path)
    assert recorder.cut(0) is None, "nothing was recorded yet"
    assert "is missing; it had 100 bytes" in str(recorder.cut(100))
    record(recorder, 0)
    at_checkpoint = recorder.sync()
    record(recorder, 1)
    assert recorder.cut(at_checkpoint) is None and path.stat().st_size == at_checkpoint
    assert f"has {at_checkpoint} of 1000000000 bytes" in str(recorder.cut(10**9))
    path.write_bytes(b"x" + path.read_bytes())
    assert "was changed" in str(recorder.cut(at_checkpoint))
    record(recorder, 2)
    recorder.close()
    assert path.read_bytes().count(b"\n") == 1, "the line that was torn is given up, and nothing is joined to it"


def test_whatever_a_model_wrote_a_line_is_one_line(tmp_path: Path) -> None:
    path = episodes_path(tmp_path, 0)
    hostile = "\x1b[2J \x85 \x9b \u2028 \u2029 \u202e \u2066 \r\n \x00 \ud800 half a character"
    with closing(EpisodeRecorder(path)) as recorder:
        record(recorder, 0, row={"answer": hostile, hostile: hostile})
    text = path.read_bytes().decode()
    assert len(text.splitlines()) == 1
    assert not set("\x1b\x85\x9b\u2028\u2029\u202e\u2066\r\x00") & set(text)
    assert read_episodes(path)[0]["row"] == {"answer": hostile, hostile: hostile}


def test_a_line_torn_by_a_kill_is_not_joined_to_the_next(tmp_path: Path) -> None:
    path = episodes_path(tmp_path, 1)
    assert path.name == "episodes.rank1.jsonl"
    with closing(EpisodeRecorder(path)) as recorder:
        record(recorder, 0)
        record(recorder, 1)
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) - 100, len(whole) // 2 + 1, 5, 0):
        path.write_bytes(whole[:kept])
        before = numbers(path)
        with closing(EpisodeRecorder(path)) as again:
            record(again, 7)
        assert numbers(path) == [*before, 7]


def test_a_full_disk_is_said() -> None:
    full = EpisodeRecorder(Path("/dev/full"))
    with closing(full), pytest.raises(StorageError, match="No space left on device"):
        record(full, 0)


def test_held_out_questions_of_a_training_have_a_recording_of_their_own(tmp_path: Path) -> None:
    path = episodes_path(tmp_path, 0)
    for label, n in (("before (greedy)", 1), ("before (greedy)", 2)):  # two processes, one after the other
        recorder = EpisodeRecorder(path)
        recorder.rollout_began(RolloutBegan(n, 0, "heldout", label))
        for number in range(n):
            record(recorder, number, mode="heldout")
        record(recorder, 7, mode="eval")
        recorder.close()
    assert numbers(path) == [7, 7]
    held = read_episodes(tmp_path / "heldout.jsonl")
    assert [(line["label"], line["mode"], line["metadata"]["episode"]) for line in held] == [
        ("before (greedy)", "heldout", number) for number in (0, 1)
    ]


def test_a_resumed_run_keeps_what_was_measured_before_it(tmp_path: Path) -> None:
    kept = []
    for label in ("before", "after", "after"):  # a process each; the last one makes a measurement again
        recorder = EpisodeRecorder(episodes_path(tmp_path, 0))
        recorder.rollout_began(RolloutBegan(1, 0, "heldout", label))
        batch = RolloutBatch(episodes=(Scored({"answer": "4"}, replace(episode(0), metadata={})),), mode="heldout")
        recorder.batch_done(batch.graded([Grade({}, 1.0)], lambda one: True))
        recorder.close()
        kept.append([line["label"] for line in read_episodes(tmp_path / "heldout.jsonl")])
    assert kept == [["before"], ["before", "after"], ["before", "after"]]
    assert [line["episode"] for line in read_episodes(tmp_path / "heldout.jsonl")] == [0, 1]


def test_several_sets_to_evaluate_on_are_apart(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(episodes_path(tmp_path, 0))
    for number, name in enumerate(("easy", "hard")):
        recorder.rollout_began(RolloutBegan(1, 5, "eval", f"evaluation after step 5 on {name}"))
        record(recorder, number, mode="eval")
    recorder.close()
    assert [len(batch) for batch in batches(tmp_path)] == [1, 1]


def test_a_long_number_of_a_call_is_read_again(tmp_path: Path) -> None:
    recorder, row = EpisodeRecorder(episodes_path(tmp_path, 0)), {"answer": "4"}
    turn = Turn(0, 2, "", None, attempts=(CallAttempt(AttemptStatus.OK, "", "f", {"n": int("3" * 101), "x": 1e150}),))
    batch = RolloutBatch(episodes=(Scored(row, replace(episode(1), turns=(turn,))),), step=0)
    recorder.batch_done(batch.graded([Grade({}, 1.0)], lambda one: True))
    assert len(read_episodes(tmp_path / "episodes.jsonl")) == 1
    recorder.begin_anew()  # as a second training of one session does
    assert not (tmp_path / "episodes.jsonl").exists()


def test_a_share_of_the_groups_is_recorded_each_whole_and_the_same_in_every_run(tmp_path: Path) -> None:
    recorded = []
    for run in ("a", "b"):
        recorder = EpisodeRecorder(tmp_path / run / "episodes.jsonl", share=0.3)
        for step in range(50):
            rows = [{"prompt": f"q{step}.{place // 4}", "answer": "4"} for place in range(8)]
            scored = tuple(Scored(row, episode(0)) for row in rows)
            batch = RolloutBatch(episodes=scored, step=step, group_size=4).numbered(8 * step)
            recorder.batch_done(batch.graded([Grade({}, 1.0)] * 8, lambda one: True))
        recorder.close()
        recorded.append(read_episodes(tmp_path / run))
    assert recorded[0] == recorded[1]
    groups = Counter(line["group"] for line in recorded[0])
    assert set(groups.values()) == {4} and 15 < len(groups) < 45
    assert all(line["episode"] - line["group"] in range(4) and line["group"] % 4 == 0 for line in recorded[0])
    assert EpisodeRecorder(tmp_path / "c" / "episodes.jsonl", share=0.0).path is None


def test_a_record_says_who_where_and_how_long_for_people_first(tmp_path: Path) -> None:
    path = episodes_path(tmp_path, 0)
    recorder = EpisodeRecorder(path)
    turn = Turn(0, 2, "x", None, results=(ToolResult("4", "add", started_s=1.5, duration_s=0.25),), duration_s=1.0)
    spoken = replace(episode(6), turns=(replace(turn, started_s=0.5),), started_s=103.0, duration_s=2.0)
    scored, times = (Scored({"prompt": "2+2?", "answer": "4"}, spoken),) * 2, RolloutTimes(6.0, 1.0, 100.0)
    batch = RolloutBatch(episodes=scored, step=5, times=times, group_size=4, offset=2)
    grades = [Grade({"right": 1.0, "form": None}, 1.0)] * 2
    recorder.batch_done(batch.graded(grades, lambda one: True).with_advantages([0.5, -0.5]))
    recorder.close()
    first, second = read_episodes(path)
    assert list(first)[:4] == ["schema", "step", "mode", "episode"]
    assert list(first)[-4:] == ["prompt_ids", "ids", "mask", "logprobs"]
    assert (first["group"], first["weight_version"], first["rewards"]) == (4, 5, {"right": 1.0, "form": None})
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)
    assert first["prompt"] == [{"role": "user", "content": "2+2?"}] and first["row"] == {"answer": "4"}
    assert row_of(first) == {"prompt": first["prompt"], "answer": "4"}
    assert first["timings"]["queued_s"] == 3.0
    assert first["timings"]["segments"] == [
        {"what": "queued", "start_s": 0.0, "s": 3.0},
        {"what": "decoding", "turn": 0, "start_s": 3.5, "s": 1.0},
        {"what": "tool", "turn": 0, "start_s": 4.5, "s": 0.25, "name": "add"},
    ]
    assert prompt_id("2+2?", {"answer": "4"}) == first["prompt_id"] != prompt_id("2+2?", {"answer": "5"})


def described(prefix: str, number: int) -> dict[str, str]:
    return {"text": f"{prefix}{number}"}


def test_the_vocabulary_has_each_token_once_and_is_of_one_tokenizer(tmp_path: Path) -> None:
    for texts in ("first", "first", "second"):
        path = episodes_path(tmp_path, 0)
        with closing(EpisodeRecorder(path, token_text=partial(described, texts))) as recorder:
            record(recorder, 0)
            record(recorder, 1)
    assert read_vocabulary(tmp_path) == {number: {"id": number, "text": f"second{number}"} for number in (1, 2, 3)}
    assert len((tmp_path / "vocabulary.jsonl.previous").read_text().splitlines()) == 3


def test_half_a_character_is_known_by_its_bytes() -> None:
    class Bytes:
        all_special_ids: ClassVar[list[int]] = [3]

        def decode(self, ids: list[int], **_: object) -> str:
            return {0: "\ufffd", 1: "\ufffd", 2: "a", 3: "<end>"}[ids[0]]

        def convert_ids_to_tokens(self, number: int) -> str:
            return {0: "Ãī", 1: "<0xE2>", 2: "a", 3: "<end>"}[number]

    halves = [{"text": "\ufffd", "bytes": "c389"}, {"text": "\ufffd", "bytes": "e2"}]
    assert token_texts(numbered_tokenizer())(65) == {"text": "t65"}
    texts = [token_texts(Bytes())(number) for number in range(4)]
    assert texts == [*halves, {"text": "a"}, {"text": "<end>", "special": True}]
