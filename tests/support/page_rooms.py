"""Rooms in which blocks of pages run: processes forked from one that has imported PyTorch already.

A page has one room for its Python, in which names live from block to block as they would in a
notebook, and each `toolgrpo` command gets a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

_COMMANDS = [f"toolgrpo.commands.{name}" for name in ("train", "evaluate", "sft", "check")]
_THEIR_PARTS = ["toolgrpo.testing.trainers", "transformers.models.qwen3.modeling_qwen3", "deepspeed"]  # imported later
_PRELOADED = ["tests.support.page_rooms", *_COMMANDS, *_THEIR_PARTS]


def _forks() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # of no effect once the server runs
    return context


def run_command(arguments: Sequence[str], folder: Path, output: Path, *, timeout_s: float = 600.0) -> int:
    """Run `toolgrpo ARGUMENTS` in a folder, with all it prints in a file; return its exit code."""
    process = _forks().Process(target=_command, args=(list(arguments), folder, output))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"toolgrpo {' '.join(arguments)} did not end within {timeout_s:.0f} s; see {output}")
    return process.exitcode


def _command(arguments: list[str], folder: Path, output: Path) -> None:
    _enter(folder, output)
    from toolgrpo.commands.main import main

    sys.exit(main(arguments))


def _enter(folder: Path, output: Path) -> None:
    os.chdir(folder)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)


class PythonRoom:
    """An interpreter in a folder that runs one text after the other; opened by `with`."""

    def __init__(self, folder: Path, output: Path, *, timeout_s: float = 600.0) -> None:
        self._arguments = (folder, output)
        self._timeout_s = timeout_s
        self._here: Connection | None = None

    def __enter__(self) -> PythonRoom:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._here is not None:
            self._here.close()  # the room ends by itself
            self._process.join(10.0)
            self._process.kill()

    def run(self, text: str, name: str) -> str | None:
        """Run a text; return the traceback if it raised."""
        if self._here is None:
            self._here, there = multiprocessing.Pipe()
            self._process = _forks().Process(target=_room, args=(there, *self._arguments))
            self._process.start()
            there.close()
        self._here.send((text, name))
        if not self._here.poll(self._timeout_s):
            raise TimeoutError(f"{name} did not end within {self._timeout_s:.0f} s")
        answer: str | None = self._here.recv()
        return answer


def _room(there: Connection, folder: Path, output: Path) -> None:
    _enter(folder, output)
    sys.path.insert(0, str(folder))
    names: dict[str, object] = {"__name__": "__main__"}
    while True:
        try:
            text, name = there.recv()
        except EOFError:
            return
        try:
            exec(compile(text, name, "exec"), names)
        except BaseException:
            there.send(traceback.format_exc())
        else:
            there.send(None)
