"""Write every trajectory as one JSON line, as it was trained on.

A line is what `batch_records` makes of an episode; docs/reference/episodes.md describes every field. Each
process writes its own file (`episodes_path`), which `line_file` keeps whole, sets aside past a size
and gzips. A checkpoint remembers how long the recording was, and a resumed run cuts it there, so no
episode stands in it twice.
Beside it stand the texts of the tokens (`vocabulary.jsonl`), so that a reader needs no tokenizer,
and the episodes of held-out rows before and after a training (`heldout.jsonl`): always those of the
process that measured last.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.observe.line_file import STEP_OF_LINE, LineFile, json_line, lines_of
from toolgrpo.observe.records import SCHEMA, ids_checksum, prompt_id, prompt_messages, read_vocabulary
from toolgrpo.observe.records import read_episodes as read_episodes  # its documented place
from toolgrpo.rollout.batch import RolloutBatch, RolloutTimes, Scored
from toolgrpo.rollout.observers import Observer, RolloutBegan

_REMEDY = (
    "Free some space and resume with resume_from_checkpoint auto, or turn the recording off with record_episodes false."
)

_FILES = {
    "episodes": "the episodes",
    "tokens": "the tokens of episodes",
    "vocabulary": "the texts of tokens",
    "heldout": "the held-out episodes",
}
"""Each file of a recording, with what an error calls that which cannot be written."""

_COMPARED = 256  # ids that tell one tokenizer from another
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HALF = "\ufffd"  # what a decoder writes for bytes that make no character

TokenText = Callable[[int], Mapping[str, Any]]
"""Gives of a token id its `text`, and where that does not say all, `bytes` and `special`."""

TokensSeen = Mapping[str, Any]
"""What the training pass saw of one episode: the fields of a line of `tokens.jsonl`."""


# One episode as one record: for people first, ids and numbers last (docs/reference/episodes.md).

_FOR_PEOPLE = ("messages", "turns")
_NUMBERS = ("prompt_ids", "ids", "mask", "logprobs")


def batch_records(batch: RolloutBatch, first_number: int = 0) -> list[dict[str, Any]]:
    """Return a record of each episode. An episode without a number of its own gets one, from `first_number` on."""
    return [
        _record(batch, episode, _number(batch, place, first_number), group_number(batch, place, first_number), question)
        for place, (episode, question) in enumerate(zip(batch.episodes, _prompt_ids(batch), strict=True))
    ]


def group_number(batch: RolloutBatch, place: int, first_number: int = 0) -> int:
    """Return the number of the first episode of a group, given the index of one of its episodes."""
    return _number(batch, place, first_number) - (batch.offset + place) % batch.group_size


def _number(batch: RolloutBatch, place: int, first_number: int) -> int:
    return int(batch.episodes[place].trajectory.metadata.get("episode", first_number + place))


def _prompt_ids(batch: RolloutBatch) -> list[str]:
    """Return the id of each episode's row, computed once per run of equal rows."""
    names: list[str] = []
    for row, same in groupby(batch.episodes, key=lambda episode: episode.row):
        columns = {name: value for name, value in row.items() if name != "prompt"}
        names += [prompt_id(row.get("prompt"), columns)] * len(list(same))
    return names


def _record(batch: RolloutBatch, episode: Scored, number: int, group: int, question: str) -> dict[str, Any]:
    trajectory = episode.trajectory
    row = {name: value for name, value in episode.row.items() if name != "prompt"}
    whole = trajectory.to_record(shared=True)
    return {
        "schema": SCHEMA,
        "step": batch.step,
        "mode": batch.mode,
        "episode": number,
        "group": group,
        "prompt_id": question,
        "success": episode.success,
        "reward_given": episode.total,
        "rewards": dict(episode.rewards),
        "advantage": episode.advantage,
        **{name: own for name in ("turn_rewards", "turn_advantages") if (own := getattr(episode, name)) is not None},
        **({} if episode.drop is None else {"drop": {"cause": episode.drop.cause, "reason": episode.drop.reason}}),
        **({} if episode.trained else {"trained": False}),
        "prompt": prompt_messages(episode.row.get("prompt")),
        **{name: whole.pop(name) for name in _FOR_PEOPLE},
        "row": row,
        **{name: value for name, value in whole.items() if name not in _NUMBERS},
        # the step whose weights drew the first token
        "weight_version": next((turn.weights[0] for turn in trajectory.turns if turn.weights is not None), batch.step),
        "timings": _timings(trajectory, batch.times),
        **{name: whole[name] for name in _NUMBERS},
    }


def _timings(trajectory: Trajectory, times: RolloutTimes) -> dict[str, Any]:
    """Return where the time of an episode went, in seconds since its rollout began."""
    queued_s = max(0.0, trajectory.started_s - times.started_s) if times.started_s else 0.0

    def segment(what: str, start_s: float, s: float, **more: Any) -> dict[str, Any]:
        return {"what": what, **more, "start_s": round(start_s, 4), "s": round(s, 4)}

    found = [segment("queued", 0.0, queued_s)] if queued_s > 0 else []
    for number, turn in enumerate(trajectory.turns):
        found.append(segment("decoding", queued_s + turn.started_s, turn.duration_s, turn=number))
        found += [
            {**segment("tool", queued_s + result.started_s, result.duration_s, turn=number), "name": result.name}
            for result in turn.results
            if result.duration_s > 0
        ]
    return {
        "queued_s": round(queued_s, 4),
        "duration_s": round(trajectory.duration_s, 4),
        "rollout_s": round(times.duration_s, 4),
        "segments": found,
    }


def token_texts(tokenizer: Any) -> TokenText:
    """Return a function from a token id to its `text`, and `bytes` and `special` where they say more."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {number for number, token in added.items() if getattr(token, "special", False)}

    def describe(number: int) -> dict[str, Any]:
        text = str(tokenizer.decode([number], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if number in special:
            return {"text": text, "special": True}
        raw = _bytes_of(str(tokenizer.convert_ids_to_tokens(number))) if _HALF in text else None
        return {"text": text} if raw is None else {"text": text, "bytes": raw.hex()}

    return describe


def _byte_letters() -> dict[str, int]:
    """Return the letter by which byte-level vocabularies write each byte, as GPT-2 chose them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


def _bytes_of(token: str) -> bytes | None:
    """Return the bytes that a token of a vocabulary stands for, if it is written in a known way."""
    single = _BYTE_TOKEN.fullmatch(token)
    if single is not None:
        return bytes([int(single[1], 16)])
    return bytes(_BYTE_OF[letter] for letter in token) if all(letter in _BYTE_OF for letter in token) else None


def episodes_path(output_dir: Path, process_index: int) -> Path:
    """Return the recording of one process: `episodes.jsonl`, `episodes.rank1.jsonl` and so on."""
    return output_dir / ("episodes.jsonl" if process_index == 0 else f"episodes.rank{process_index}.jsonl")


def recorded_group(group: int, share: float) -> bool:
    """Return whether a group is among the recorded share: the same ones in every run."""
    return share >= 1 or zlib.crc32(f"group {group}".encode()) < share * 2**32


class EpisodeRecorder(Observer):
    """Record the episodes that are trained on or evaluated; without a path, record nothing.

    `share` of the groups are recorded, each whole. With `token_text` it also keeps the vocabulary.
    """

    def __init__(self, path: Path | None, *, share: float = 1.0, token_text: TokenText | None = None) -> None:
        self.path = path if share > 0 else None
        self.n_bytes = 0  # of episodes and tokens, since this process began
        self._share = share
        self._token_text = token_text
        self._known_ids: set[int] | None = None
        self._first_number = {"heldout": 0, "episodes": 0}  # of episodes that have none of their own
        self._label = ""
        self._files = {}
        if self.path is not None:
            self._files = {
                kind: LineFile(
                    self.path.with_name(self.path.name.replace("episodes", kind, 1)), what=what, remedy=_REMEDY
                )
                for kind, what in _FILES.items()
            }

    def records(self, batch: RolloutBatch, place: int) -> bool:
        """Return whether the episode at this place of a numbered batch is recorded."""
        return self.path is not None and recorded_group(group_number(batch, place), self._share)

    def rollout_began(self, event: RolloutBegan) -> None:
        self._label = event.label

    def batch_done(self, batch: RolloutBatch) -> None:
        """Append one line per trajectory and flush, so that a killed run keeps what it did."""
        if not self._files or not len(batch):
            return
        kind = "heldout" if batch.mode == "heldout" else "episodes"
        if kind == "heldout" and not self._files[kind].is_open:
            self._keep_other_measurements(batch.step)
        records = batch_records(batch, self._first_number[kind])
        if batch.mode != "train":
            records = [{**record, "label": self._label} for record in records]
        self._first_number[kind] += len(batch)
        wanted = [record for record in records if recorded_group(record["group"], self._share)]
        self._keep_texts(wanted)
        self.n_bytes += self._files[kind].write([json_line(record) for record in wanted])

    def _keep_other_measurements(self, step: int) -> None:
        """Keep what earlier processes measured before this: a resumed run goes on behind it, the same one is made anew."""
        file, label = self._files["heldout"], f'"label": {json_line({"": self._label})[5:-2]}'
        n_bytes, last, again = 0, "", False
        for line in lines_of(file.path):
            found = STEP_OF_LINE.match(line.text[:80])
            again = found is not None and int(found[1]) == step and label in line.text[-len(label) - 40 :]
            if again:
                break
            n_bytes, last = n_bytes + len(line.text.encode()), line.text
        if again and not last:
            file.start_anew()
        elif again:
            file.cut(n_bytes)
        with suppress(ValueError, LookupError, TypeError):  # what is no line of ours has no number
            self._first_number["heldout"] = json.loads(last)["episode"] + 1

    def begin_anew(self) -> None:
        """Set aside what an earlier training of this session recorded."""
        for kind in ("episodes", "tokens") if self._files else ():
            self._files[kind].close()
            self._files[kind].start_anew()

    def tokens_seen(self, seen: TokensSeen, ids: list[int]) -> None:
        """Append the training pass's view of one episode, whose tokens after the prompt are `ids`."""
        if self._files:
            line = {"schema": SCHEMA, **seen, "ids_crc32": ids_checksum(ids)}
            self.n_bytes += self._files["tokens"].write([json_line(line)])

    def sync(self) -> int:
        """Bring everything to the disk, and return how many bytes the recording of episodes has."""
        for file in self._files.values():
            file.sync()
        return self.size()

    def size(self) -> int:
        """Return how many bytes the recording of episodes has so far."""
        return self._files["episodes"].size() if self._files else 0

    def open_kinds(self) -> list[str]:
        """Return the files of the recording that this process has written to: `heldout`, ..."""
        return [kind for kind, file in self._files.items() if file.is_open]

    def bytes_before(self, step: int) -> int:
        """Return how many bytes the recording has of steps before this one."""
        n_bytes = 0
        for line in lines_of(self._files["episodes"].path):
            found = STEP_OF_LINE.match(line.text[:80])
            ahead = found is not None and int(found[1]) >= step + (found[2] == "eval")  # after so many steps
            if ahead or line.fault:
                break
            n_bytes += len(line.text.encode())  # with its end
        return n_bytes

    def cut(self, n_bytes: int) -> str | None:
        """Forget what was recorded after the first `n_bytes`: the resumed run records it again.

        Returns what is wrong with the recording up to there, or None. A line that was torn there is
        given up. What was seen of tokens stays: its readers take the last line of an episode, and
        only if it is about the same tokens.
        """
        return self._files["episodes"].cut(n_bytes) if self._files else None

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _keep_texts(self, records: list[dict[str, Any]]) -> None:
        """Write the text of each token that is new, once in a recording."""
        if self._token_text is None:
            return
        if self._known_ids is None:
            self._known_ids = self._ids_of_before(self._token_text)
        new = {number for record in records for ids in ("prompt_ids", "ids") for number in record[ids]}
        new -= self._known_ids
        if new:
            lines = [json_line({"id": number, **self._token_text(number)}) for number in sorted(new)]
            self._files["vocabulary"].write(lines)
            self._known_ids |= new

    def _ids_of_before(self, token_text: TokenText) -> set[int]:
        """Return the ids that are written already; a vocabulary of another tokenizer is set aside."""
        file = self._files["vocabulary"]
        written = read_vocabulary(file.path.parent) if file.path.exists() else {}
        for number in sorted(written)[:_COMPARED]:
            if {name: value for name, value in written[number].items() if name != "id"} != token_text(number):
                file.start_anew()
                return set()
        return set(written)
