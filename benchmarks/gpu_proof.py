"""A proof for GPUs, for whoever has one: `make gpu-proof` runs every part and writes one JSON and one Markdown table.

    make gpu-proof                                       # installs requirements-cuda.lock first; some hours on one GPU (an estimate)
    python benchmarks/gpu_proof.py --only steps_lora     # some parts, where everything is installed
    python benchmarks/gpu_proof.py --device cpu --tiny   # what can be run without a GPU, in small; the rest says what it needs

Nothing is downloaded: models are random weights of a real shape, or nano, which is built here. Each part (`_gpu_parts.py`)
runs in a process of its own with a time limit, and its row is written as it ends. A part that fails, or measures what it must
not, says so, and the others run all the same; the exit status is 1 if any did. A part for which there are not enough GPUs is
a row that says what it needs. Writes build/gpu_proof/gpu_proof.json and gpu_proof.md; --out names another folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    from toolgrpo.support.process_setup import prepare

    prepare()  # before anything imports PyTorch

from _gpu_parts import PARTS, Figure, Part, Place
from _machine import Stamp, stamp_of

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "gpu_proof"
NEEDS = (
    "the GPU proof needs an NVIDIA GPU that PyTorch for CUDA can use, and here there is none; "
    "`--device cpu --tiny` runs what can be run without one"
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

    @property
    def failed(self) -> bool:
        return self.status != "ok" and not self.status.startswith("needs")


@dataclass(frozen=True, slots=True)
class Proof:
    """All rows so far, and where they come from."""

    device: str
    tiny: bool
    stamp: Stamp
    rows: tuple[Row, ...]

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
            cells = (row.about, row.status, f"{row.seconds:.0f}", "; ".join(str(figure) for figure in row.figures))
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        for row in self.rows:
            if row.said:
                lines += ["", f"## {row.part}: {row.status}", "", "```", row.said, "```"]
        return "\n".join([*lines, ""])


def prove(names: Sequence[str], place: Place, out: Path) -> Proof:
    """Run the parts one after the other; what is there is written after each."""
    proof = Proof(_device_line(place), place.tiny, stamp_of(quick=place.tiny), ())
    for name in names:
        print(f"== {name}: {PARTS[name].about} (at most {_limit_s(PARTS[name], place) / 60:.0f} min)", flush=True)
        row = run_part(name, place)
        print(f"   {row.status}, {row.seconds:.0f} s" + "".join(f"\n   {figure}" for figure in row.figures), flush=True)
        proof = Proof(proof.device, proof.tiny, proof.stamp, (*proof.rows, row))
        proof.write(out)
    return proof


def run_part(name: str, place: Place) -> Row:
    """Run a part in a process of its own, and end it with all that it started at its limit."""
    part = PARTS[name]
    missing = part.missing(place)
    if missing is not None:
        return Row(part=name, about=part.about, status=missing)
    limit_s, started = _limit_s(part, place), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--part", name, "--device", place.device, "--answer", str(answer)]
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*command, *(["--tiny"] if place.tiny else [])],
                cwd=ROOT,
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
        figures = tuple(Figure(**one) for one in json.loads(answer.read_text())) if answer.exists() else ()
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


def _limit_s(part: Part, place: Place) -> float:
    return 900.0 if place.tiny else part.limit_s


def _device_line(place: Place) -> str:
    if place.device == "cpu":
        return "no GPU"
    import torch

    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)


def _answer(name: str, place: Place, answer: Path) -> None:
    """In a part's own process: measure, and write down what was measured until an error too."""
    figures: list[Figure] = []
    try:
        for figure in PARTS[name].run(place):
            figures.append(figure)
    finally:
        answer.write_text(json.dumps([asdict(figure) for figure in figures]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few steps: that it runs, not what it gives"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    place = Place(options.device, options.tiny)
    if place.device == "cuda" and place.n_gpus == 0:
        parser.exit(2, f"{NEEDS}\n")
    if options.part:
        _answer(options.part, place, options.answer)
        return 0
    proof = prove(options.only or list(PARTS), place, options.out)
    failed = [row.part for row in proof.rows if row.failed]
    print(f"\n{proof.markdown}\nwrote {options.out}/gpu_proof.json and gpu_proof.md")
    if failed:
        print(f"not as it should be: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
