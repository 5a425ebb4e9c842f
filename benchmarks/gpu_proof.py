"""A proof for GPUs, for whoever has one: `make gpu-proof` runs every part and writes one JSON and one Markdown table.

    make gpu-proof                                       # installs requirements-cuda.lock first; some hours on one GPU (an estimate)
    python benchmarks/gpu_proof.py --only steps_lora     # some parts, where everything is installed
    python benchmarks/gpu_proof.py --budget_s 540        # on a GPU that is lent for nine minutes, with what is installed there
    python benchmarks/gpu_proof.py --device cpu --tiny   # what can be run without a GPU, in small; the rest says what it needs

With `--budget_s` nothing is installed and nothing begins for which no time is left; a part that is cut short keeps its
figures. The next call with the same --out goes on: with what was not begun, then with what was cut short or failed.

Nothing is downloaded: models are random weights of a real shape, or nano, which is built here. Each part (`_gpu_parts.py`, the
most valuable first) runs in a process of its own with a time limit, and its row is written as it ends. A part that fails, or
measures what it must not, says so, and the others run all the same; the exit status is 1 if any did. A part that lacks GPUs or
packages is a row that says so. Writes build/gpu_proof/gpu_proof.json and gpu_proof.md; --out names another folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "confined-python")]
    from toolgrpo.support.process_setup import prepare

    prepare()  # before anything imports PyTorch

from _gpu_parts import PARTS
from _gpu_place import Figure, Place
from _machine import Stamp, stamp_of

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "confined-python")))  # where nothing of ours is installed
LEAST_S = 20.0  # of a budget, for a part to begin
CUT_SHORT = "cut short by the budget"
BEGAN = time.monotonic()
OUT = ROOT / "build" / "gpu_proof"
NEEDS = (
    "the GPU proof needs an NVIDIA GPU for CUDA, and finds none; `--device cpu --tiny` runs what can be run without one"
)
SAID_CHARS = 1500  # of a part that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a part ended, and what it measured."""

    part: str
    about: str
    status: str  # `ok`, or what came between
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    said: str = ""
    commit: str = ""  # at which it was measured

    @property
    def failed(self) -> bool:
        return self.status != "ok" and not self.status.startswith(("needs", "not begun", CUT_SHORT))


@dataclass(frozen=True, slots=True)
class Proof:
    """All rows so far, and where they come from."""

    device: str
    tiny: bool
    stamp: Stamp
    rows: tuple[Row, ...]

    def earlier(self, folder: Path) -> dict[str, Row]:
        """Return the rows that an earlier call has written there."""
        if not (folder / "gpu_proof.json").exists():
            return {}
        found = json.loads((folder / "gpu_proof.json").read_text())
        if (found["device"], found["tiny"]) != (self.device, self.tiny):
            raise SystemExit(
                f"{folder} has what was measured on {found['device']}, and this is {self.device}: give --out"
            )
        rows = (Row(**{**row, "figures": tuple(Figure(**one) for one in row["figures"])}) for row in found["rows"])
        return {row.part: row for row in rows}

    def write(self, folder: Path) -> None:
        """Write the JSON and the table; a reader never sees half of a file."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "device": self.device,
            "tiny": self.tiny,
            "stamp": self.stamp.as_json(),
            "rows": list(map(asdict, self.rows)),
        }
        for name, text in (("gpu_proof.json", json.dumps(found, indent=1) + "\n"), ("gpu_proof.md", self.markdown)):
            beside = folder / f"{name}.part"
            beside.write_text(text)
            beside.replace(folder / name)

    @property
    def markdown(self) -> str:
        """The table, with the machine and the versions above it."""
        versions = ", ".join(f"{name} {version}" for name, version in self.stamp.versions.items())
        lines = [
            "# GPU proof" + (", in small: it shows that the parts run, not what a GPU gives" if self.tiny else ""),
            "",
            f"{self.device}; {self.stamp.machine.line}. {versions}. Commit {self.stamp.commit}, {self.stamp.date[:10]}.",
            "",
            "| part | how it ended | seconds | measured |",
            "|---|---|---|---|",
        ]
        for row in self.rows:
            status = row.status if row.commit in ("", self.stamp.commit) else f"{row.status}, at commit {row.commit}"
            cells = (row.about, status, f"{row.seconds:.0f}", "; ".join(str(figure) for figure in row.figures))
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        for row in self.rows:
            if row.said:
                lines += ["", f"## {row.part}: {row.status}", "", "```", row.said, "```"]
        return "\n".join([*lines, ""])


def prove(names: Sequence[str], place: Place, out: Path, budget_s: float | None = None) -> Proof:
    """Run the parts one after the other; what is there is written after each. With a budget go on where a call ended."""
    end = math.inf if budget_s is None else time.monotonic() + budget_s
    proof = Proof(_device_line(place), place.tiny, stamp_of(quick=place.tiny), ())
    rows = {} if budget_s is None else proof.earlier(out)
    proof = replace(proof, rows=tuple(rows.values()))
    for name in sorted(names, key=lambda name: name in rows and not rows[name].status.startswith("not begun")):
        row = rows.get(name) or Row(part=name, about=PARTS[name].about, status="not begun: the budget was spent")
        if row.status == "ok" and name != "environment":
            continue
        limit_s, left_s = 900.0 if place.tiny else PARTS[name].limit_s, end - time.monotonic()
        print(f"== {name}: {row.about} (at most {min(limit_s, left_s) / 60:.1f} min)", flush=True)
        if left_s > LEAST_S:
            known = row.figures if row.status == CUT_SHORT else ()
            row = replace(run_part(name, place, min(limit_s, left_s), known), commit=proof.stamp.commit)
            if row.status.startswith("over") and left_s < limit_s:
                row = replace(row, status=CUT_SHORT)
        print(f"   {row.status}, {row.seconds:.0f} s" + "".join(f"\n   {figure}" for figure in row.figures), flush=True)
        rows[name] = row
        proof = replace(proof, rows=tuple(rows[one] for one in PARTS if one in rows))
        proof.write(out)
    return proof


def run_part(name: str, place: Place, limit_s: float, before: Sequence[Figure] = ()) -> Row:
    """Run a part in a process of its own, and end it at its limit; figures of `before` need not be measured again."""
    part, started = PARTS[name], time.monotonic()
    missing = part.missing(place)
    if missing is not None:
        return Row(part=name, about=part.about, status=missing)
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        answer.write_text(json.dumps(list(map(asdict, before))))
        command = [sys.executable, __file__, "--part", name, "--device", place.device, "--answer", str(answer)]
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*command, *(["--tiny"] if place.tiny else [])],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([PATH, os.environ.get("PYTHONPATH", "")])},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = "failed" if process.wait(limit_s) else "ok"
            except subprocess.TimeoutExpired:
                status = f"over its limit of {limit_s:.0f} s"
            finally:
                _end(process)
        figures = tuple(Figure(**one) for one in json.loads(answer.read_text()))
        if status == "ok" and (not figures or any(figure.is_off for figure in figures)):
            status = "failed"
        text = log.read_text(errors="replace")[-SAID_CHARS:] if status != "ok" else ""
    return Row(
        part=name, about=part.about, status=status, seconds=time.monotonic() - started, figures=figures, said=text
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what a part has left behind; its process is the first of a group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _device_line(place: Place) -> str:
    if place.device == "cpu":
        return "no GPU"
    import torch

    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)


def _answer(name: str, place: Place, answer: Path) -> None:
    """In a part's own process: measure, and write each figure down as it is measured."""
    figures = {one["what"]: Figure(**one) for one in json.loads(answer.read_text())}
    for figure in PARTS[name].run(replace(place, known=frozenset(figures))):
        figures[figure.what] = figure
        beside = answer.with_suffix(".part")
        beside.write_text(json.dumps(list(map(asdict, figures.values()))))
        beside.replace(answer)  # a reader of a process that was killed finds whole figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few steps: that it runs, not what it gives"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--budget_s", type=float, help="seconds for all of it, and go on with what is not done in --out"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    place = Place(options.device, options.tiny)
    if place.device == "cuda" and place.n_gpus == 0:
        parser.exit(2, f"{NEEDS}\n")
    if options.part:
        _answer(options.part, place, options.answer)
        return 0
    left_s = options.budget_s and options.budget_s - (time.monotonic() - BEGAN)  # PyTorch is imported by now
    proof = prove(options.only or list(PARTS), place, options.out, left_s)
    failed = [row.part for row in proof.rows if row.failed]
    print(f"\n{proof.markdown}\nwrote {options.out}/gpu_proof.json and gpu_proof.md")
    if failed:
        print(f"not as it should be: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
