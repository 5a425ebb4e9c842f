"""Talk to a model in the terminal, with its tools (`toolgrpo chat`).

    toolgrpo chat outputs/shop                      with what its run was given (outputs/shop/run.yaml)
    toolgrpo chat MODEL --tools_script my_tools.py

A conversation is one episode in which you are the user: prompt, bridges, calls and results are those of a
training, token for token, and tools run in the workers with their deadlines. Commands are `/reset`, `/tools`,
`/save FILE.jsonl` (a row for `toolgrpo sft`) and `/quit`; Ctrl-D ends it too. Ctrl-C stops the answer: the question
is forgotten, and what was said before it is the prompt of another episode.

Not covered: words as they are drawn; a turn is shown when it is whole. After a stopped answer, an environment begins anew.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from toolgrpo.chat.base import ParsedTurn, assistant_message, tool_message
from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.evaluate import EvaluationConfig
from toolgrpo.commands.given import Given
from toolgrpo.commands.job import Job
from toolgrpo.commands.loaded_model import engine_of, load_model
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import Message, Trajectory
from toolgrpo.errors import ConfigError, ToolGRPOError
from toolgrpo.observe.line_file import json_line
from toolgrpo.rollout import Episode, EpisodeRunner
from toolgrpo.rollout.episode import EpisodeRun
from toolgrpo.rollout.limits import TokenCutter
from toolgrpo.support.plain_text import plain
from toolgrpo.support.storage import CONVERSATIONS, check_output, storage_errors
from toolgrpo.tools.arguments import signatures_text
from toolgrpo.tools.base import ToolProvider, ToolSession
from toolgrpo.tools.render import RenderedText
from toolgrpo.trainer.config import ModelConfig

_COMMANDS = "/reset starts over, /tools lists the tools, /save FILE.jsonl saves the conversation; Ctrl-C stops an answer, Ctrl-D or /quit ends it"


def chat_arguments(given: Given) -> tuple[ScriptArguments, EvaluationConfig, ModelConfig]:
    """Return the arguments of a chat."""
    if "agent" in given.places:  # of the folder's own training, and not typed
        given = replace(given, values={name: one for name, one in given.values.items() if name != "agent"})
    script, config, model = given.made((ScriptArguments, EvaluationConfig, ModelConfig))
    if script.agent:
        raise ConfigError("an agent plays its episodes itself; talk to the model without --agent")
    return script, config, model


class Conversation(ToolSession):
    """The user and the tools of one conversation: the terminal speaks, and what happens is shown there."""

    def __init__(self, inner: ToolSession | None, chat: ChatTools) -> None:
        super().__init__(inner)
        self._inner = inner
        self._chat = chat

    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]:
        for attempt in attempts:
            arguments = ", ".join(f"{name}={value!r}" for name, value in (attempt.arguments or {}).items())
            self._chat.show(
                "calls", attempt.raw if attempt.arguments is None else f"{attempt.name}({arguments})", "yellow"
            )
        if self._inner is not None:
            results = await self._inner.call(attempts) if attempts else ()
        else:
            none = "Error: there are no tools here"
            results = tuple(ToolResult(none, one.name, ToolErrorKind.UNKNOWN_TOOL) for one in attempts)
        if attempts:  # with calls that were found in the text after it was shown
            self._chat.messages[-1] = assistant_message(replace(self._chat.last, attempts=tuple(attempts)))
        for attempt, result in zip(attempts, results, strict=True):
            self._chat.show("result", result.content, "magenta" if result.ok else "red")
            content = self._chat.cutter(result.content, result.left_out).text
            self._chat.messages.append(tool_message(result.name, content, attempt.call_id))
        return results

    async def next_user_message(self, answer: str) -> str | None:
        return self._chat.ask()

    async def __aenter__(self) -> Conversation:
        if self._inner is not None:
            await self._inner.__aenter__()
            if self.observation:
                self._chat.show("environment", self.observation, "cyan")
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._inner is not None:
            await self._inner.__aexit__(*raised)


@dataclass
class ChatTools:
    """The tools of a chat, with whom the person at the terminal speaks for the user; `ended` once they have gone.

    `kept` is how a conversation goes on whose answer was stopped.
    """

    tools: ToolProvider | None
    terminal: Terminal
    system_prompt: str | None = None
    speaks: bool = True
    ended: bool = False
    typing: bool = False
    stopping: bool = False
    messages: list[Message] = field(default_factory=list)
    kept: list[Message] = field(default_factory=list)
    cutter: Callable[[str, int], RenderedText] = RenderedText  # as episodes cut a result
    last: ParsedTurn = field(default_factory=lambda: ParsedTurn("", None, (), True))

    @property
    def names(self) -> list[str]:
        return [] if self.tools is None else self.tools.names

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [] if self.tools is None else self.tools.schemas

    def session(self, row: Mapping[str, Any]) -> ToolSession:
        return Conversation(None if self.tools is None else self.tools.session(row), self)

    def close(self) -> None:
        if self.tools is not None:
            self.tools.close()

    def opening(self) -> tuple[Message, ...] | None:
        """Return the messages with which a conversation begins; None where nobody begins one."""
        text = self.ask()  # until then `/save` keeps the one before
        if text is None:
            return None
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        self.messages = [*(self.kept or system), {"role": "user", "content": text}]
        self.kept = []
        return tuple(self.messages)

    def ask(self) -> str | None:
        """Return what the user says next; None where the conversation ends with that."""
        while True:
            line = self._line()
            text = line.strip()
            command, _, rest = text.partition(" ")
            if not line or text in ("/reset", "/quit"):
                self.ended, self.kept = text != "/reset", []
                return None
            if command == "/tools":
                self.terminal.say(signatures_text(self.schemas) or "none")
            elif command == "/save" and not self.messages:
                self.terminal.say("the conversation is empty")
            elif command == "/save":
                self._save(Path(rest or "chat.jsonl").expanduser())
            elif command.startswith("/"):
                self.terminal.say(_COMMANDS)
            elif text:
                self.messages.append({"role": "user", "content": text})
                return text

    def take_back(self) -> None:
        """Forget the last message of the user, whose answer was stopped."""
        said = [number for number, one in enumerate(self.messages) if one["role"] == "user"]
        self.kept = self.messages[: said[-1]] if len(said) > 1 else []
        self.messages = [*self.kept]
        self.stopping = False
        self.terminal.say("stopped; your last message is removed" + (", the rest goes on" if self.kept else ""))

    def _line(self) -> str:
        """Return a line that was typed, with its end; Ctrl-C begins another, and none is left after Ctrl-D."""
        while True:
            try:
                self.typing = True
                self.terminal.stream.write("you: ")
                return "" if sys.stdin is None else sys.stdin.readline()  # None: it is closed
            except KeyboardInterrupt:
                self.terminal.say("")
            finally:
                self.typing = False

    def said(self, turn: ParsedTurn) -> None:
        """Show a turn of the model."""
        if turn.reasoning:
            self.show("thinks", turn.reasoning.strip(), "dim")
        if turn.content.strip() or not turn.attempts:
            self.show("model", turn.content.strip(), "green")
        self.last = turn
        self.messages.append(assistant_message(turn))

    def show(self, who: str, text: str, style: str) -> None:
        self.terminal.console.print(Text(f"{who}: ", style=f"bold {style}").append(plain(text), style="not bold"))

    def _save(self, path: Path) -> None:
        row = {"messages": self.messages, **({"tools": self.schemas} if self.schemas else {})}
        try:
            check_output(path, "the conversation", "/save FILE.jsonl", CONVERSATIONS)
            with storage_errors(f"the conversation {path}", path.parent), path.open("a", encoding="utf-8") as file:
                file.write(json_line(row))
        except ToolGRPOError as error:
            self.terminal.say(str(error))
        else:
            self.terminal.say(f"{len(self.messages)} messages are now a row of {path}, as `toolgrpo sft` takes it")


@dataclass(frozen=True, kw_only=True)
class ShowingRunner(EpisodeRunner):
    """Shows each turn as soon as it is sampled."""

    show_turn: Callable[[ParsedTurn], None]

    async def sample(self, request: SampleRequest) -> Sample:
        sample = await EpisodeRunner.sample(self, request)
        self.show_turn(self.parts.chat.parse(sample.ids, before=request.ids))
        return sample


def run_chat(given: Given, terminal: Terminal) -> int:
    """Talk until the person ends it."""
    script, config, model = chat_arguments(given)
    with tempfile.TemporaryDirectory(prefix="toolgrpo-chat-") as folder:
        job = Job(script, config.changed(output_dir=folder), model, terminal)
        chat = ChatTools(job.toolbox(), terminal, script.system_prompt)
        try:
            _talk(job, chat)
        finally:
            chat.close()
    return 0


def _talk(job: Job, chat: ChatTools) -> None:
    config, say = job.config, chat.terminal.say
    parts = load_model(job, job.model_name, toolbox=chat)
    engine = engine_of(parts, say)
    limits = replace(
        config.episode_limits(),
        max_completion_length=engine.max_model_len,
        max_turns=None,
        max_tool_calls=None,
        max_user_turns=None,
        deadline_s=None,
    )
    rollouts = replace(parts.rollouts(engine), limits=limits)
    chat.cutter = TokenCutter(rollouts.tokenizer, limits.max_tool_response_tokens)
    runner = ShowingRunner(rollouts, config.sampling_options(), show_turn=chat.said)
    try:
        engine.load_weights(parts.policy.weights())
        say(_COMMANDS)
        asyncio.run(converse(runner, chat, config.enable_thinking))
    except KeyboardInterrupt:
        say("")
    finally:
        engine.shutdown()


async def converse(runner: EpisodeRunner, chat: ChatTools, thinking: bool | None) -> None:
    """Hold one conversation after the other, each an episode, until the person ends it."""
    loop = asyncio.get_running_loop()
    playing: asyncio.Future[Trajectory] | None = None

    def interrupted(number: int, frame: object) -> None:
        if chat.typing or chat.stopping:  # the second one does not wait for what does not stop
            raise KeyboardInterrupt
        if playing is not None:
            chat.stopping = True
            loop.call_soon_threadsafe(playing.cancel)

    await runner.parts.engine.open()
    before = signal.signal(signal.SIGINT, interrupted)  # asyncio's own would wait for the line that is being typed
    try:
        while not chat.ended:
            messages = chat.opening()
            if messages is None:
                continue
            playing = asyncio.ensure_future(EpisodeRun(runner, Episode(messages, enable_thinking=thinking)).play())
            with suppress(asyncio.CancelledError):
                trajectory = await playing
            stopped, playing = playing.cancelled(), None
            if stopped:
                chat.take_back()
                continue
            if trajectory.failure:
                chat.terminal.say(trajectory.failure)
            if not chat.ended:
                chat.terminal.say(
                    f"the conversation has ended ({trajectory.stop_reason}); the next line starts another"
                )
    finally:
        signal.signal(signal.SIGINT, before)
        await runner.parts.engine.close()
