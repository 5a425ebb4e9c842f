"""Take what a job written for TRL's `GRPOTrainer` brings, where it means something here.

* prompts that are plain text are a user's message, and a reward that may want strings is told so;
* `generation_kwargs` with the fields of our own sampling are those fields;
* `chat_template_kwargs` go to the chat template, also while the chat format is proven;
* an `environment_factory` is an environment of the tools, its `get_reward` a reward.

What means nothing here is refused with what to use instead. Knows no trainer: values in, values out.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from datasets import Dataset

from toolgrpo.data.rows import IMAGE_COLUMNS
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.rewards import Reward
from toolgrpo.rewards.environment import environment

logger = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAID_ELSEWHERE = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message")


def take_trl_arguments(fields: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Spread the dictionaries of TRL's config over the fields they stand for, while the config is made."""
    for name in ("generation_kwargs", "chat_template_kwargs"):
        value = fields[name]
        if isinstance(value, str):  # a flag
            with suppress(json.JSONDecodeError):
                fields[name] = value = json.loads(value)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a dictionary (on the command line in JSON), got {value!r}")
    sampling = _sampling(dict(fields["generation_kwargs"] or {}))
    for name, value in sampling.items():
        if fields[name] not in (defaults[name], value):
            raise ConfigError(f"{name} is {fields[name]}, but generation_kwargs says {value}; keep one of them")
    fields.update(sampling)
    fields["enable_thinking"] = _thinking(dict(fields["chat_template_kwargs"] or {}), fields["enable_thinking"])


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    if given.pop("do_sample", True) is not True:
        raise ConfigError("generation_kwargs has do_sample: false, but episodes of training are always sampled")
    unknown = sorted(given.keys() - set(_SAMPLING))
    if unknown:
        raise ConfigError(
            f"generation_kwargs has {', '.join(unknown)}, which the engines here do not have: every token is drawn for "
            f"itself, with {', '.join(_SAMPLING)}; leave the rest out"
        )
    return given


def _thinking(given: Mapping[str, Any], said: bool | None) -> bool | None:
    odd = sorted(given.keys() & set(_SAID_ELSEWHERE))
    if odd:
        raise ConfigError(f"chat_template_kwargs has {odd[0]}, which each episode says itself; leave it out")
    thinking = given.get("enable_thinking")
    if thinking is None:
        return said
    if said not in (None, thinking):
        raise ConfigError(f"enable_thinking is {said}, but chat_template_kwargs says {thinking}; keep one of them")
    return bool(thinking)


def warn_of_text(rows: Any, rewards: Any) -> None:
    """Warn if prompts are plain text and a reward is a function, which may be written for strings.

    Many a function runs with messages, too: the length of a completion is then the number of its messages.
    """
    first = next(iter(rows), None) if rows is not None else None
    if not isinstance(first, Mapping) or not isinstance(first.get("prompt"), str):
        return
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        if inspect.isroutine(reward):
            logger.warning(
                "the prompts are plain text and there are no tools: each prompt is a user's message, and reward %s gets "
                "lists of messages. To continue raw text, with strings for rewards, use TRL's GRPOTrainer",
                reward.__name__,
            )
            return


def refuse_images(rows: Any) -> None:
    """Refuse rows with pictures, as the first of them tells: nothing here would show them to the model."""
    if isinstance(rows, Mapping):  # several sets to evaluate on
        for one in rows.values():
            refuse_images(one)
        return
    first = next(iter(rows), None) if rows is not None else None
    if not isinstance(first, Mapping):
        return
    column = next((name for name in IMAGE_COLUMNS if name in first), None)
    if column is not None or _shows_images(first.get("prompt")):
        where = "a prompt with an image" if column is None else f"a column {column!r}"
        raise ConfigError(
            f"the rows have {where}, and episodes here are text: no model would see it. Keep TRL's GRPOTrainer for models "
            f"that see; for a job of text leave the images out (a column of that name that holds none: rename it)"
        )


def _shows_images(prompt: Any) -> bool:
    messages = [one for one in prompt if isinstance(one, Mapping)] if isinstance(prompt, list) else []
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return any(isinstance(part, Mapping) and "image" in str(part.get("type")) for part in parts)


def refuse_rollout_func(rollout_func: Any) -> None:
    """Refuse a function that would replace every episode."""
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func would replace the episodes that ToolGRPOTrainer is for; implement it as tools or "
            "as an environment (`tools=`, `environment_factory=`), or keep TRL's GRPOTrainer for this job"
        )


def refuse_replaced_generate(model: Any) -> None:
    """Refuse a model whose `generate` was replaced, by a function or a mock: it would have no effect."""
    generate = getattr(model, "generate", None)
    if generate is not None and not inspect.ismethod(generate):
        raise ConfigError(
            "the model's `generate` was replaced, and nothing here calls it: an engine draws every turn. Put the "
            "replacement into an engine (`engine=`: an object with the methods of toolgrpo.engines.base.Engine, or "
            "toolgrpo.testing.ScriptedEngine for fixed turns), or take it off"
        )


class ToolsElsewhere(list[Any]):
    """TRL's `trainer.tools`: empty, so that TRL's own loop stays out, and nobody who asks it is told that there are none."""

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(
            "trainer.tools holds no functions here: tools run in their own processes. Their names are "
            "trainer.toolbox.names, what the model is shown is trainer.toolbox.schemas"
        )


def single_factory(factory: Any, rows: Any = None) -> Callable[[], Any] | None:
    """Return the one environment class of an `environment_factory`, which is that of all rows."""
    if isinstance(factory, Mapping):
        if len(factory) != 1:
            raise ConfigError(
                f"environment_factory names {len(factory)} environments ({', '.join(map(str, factory))}); here all rows "
                f"have the same one. Write a class whose reset(**row) chooses by the row, and let the column `tools` name what each row "
                f"is offered"
            )
        ((known, factory),) = factory.items()
        named = rows["environment"] if isinstance(rows, Dataset) and "environment" in rows.column_names else ()
        others = ", ".join(sorted(repr(name) for name in set(named) - {known}))
        if others:
            raise ConfigError(
                f"the column `environment` has {others}, not among the environments of environment_factory ({known!r}); "
                f"correct the rows, or give the class alone instead of a dictionary: then all rows have it"
            )
    if factory is not None and not callable(factory):
        raise ConfigError(f"environment_factory must be a class or a function that makes environments, got {factory!r}")
    made: Callable[[], Any] | None = factory
    return made


def _environment_rewards(factory: Callable[[], Any] | None) -> list[Reward]:
    """Return the reward that an environment class gives for its own episodes, under the name of the class."""
    owner = factory if inspect.isclass(factory) else None if factory is None else type(factory())
    if owner is None or not any(callable(getattr(owner, name, None)) for name in ("reward", "get_reward")):
        return []
    return [Reward(environment, name=owner.__name__, source=f"the environment {owner.__name__}")]


def placeholder_rows(n_rows: int, max_steps: int) -> Dataset:
    """Return empty questions for an environment that brings its own."""
    if max_steps <= 0:
        raise ConfigError("no train_dataset is given, so the environment brings the questions: set max_steps, too")
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * n_rows})


def with_environment(
    rewards: Any, weights: Sequence[float] | None, factory: Callable[[], Any] | None
) -> tuple[Any, list[float] | None]:
    """Return the rewards and their weights with the environment's own behind them, of weight 1 as in TRL."""
    own = _environment_rewards(factory)
    if not own:
        return rewards, None if weights is None else list(weights)
    given = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    return [*given, *own], None if weights is None else [*weights, *(1.0 for _ in own)]


@contextmanager
def point_to_messages(rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Say in an error of a reward that completions are messages, where it may have taken them for text."""
    try:
        yield
    except (TypeError, AttributeError, RewardError) as error:
        if rows and isinstance(rows[0]["prompt"], str):
            error.add_note(
                "The prompts of the data are plain text, which is shown as a user's message, and completions are lists of "
                "messages. To continue raw text, with strings for rewards, use TRL's GRPOTrainer."
            )
        raise


def check_reward_arguments(rewards: Any) -> None:
    """Refuse a reward that wants the instances of environments, which live in the tool workers."""
    for reward in rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]:
        try:
            parameters = inspect.signature(reward).parameters
        except (TypeError, ValueError):  # a model, or its name
            continue
        if "environments" in parameters:
            name = getattr(reward, "__name__", type(reward).__name__)
            raise ConfigError(
                f"reward {name} asks for `environments`, but the instances live in the tool workers. Give the "
                f"class a get_reward(): its value is a reward by itself and is in `trajectories[i].reward`"
            )
