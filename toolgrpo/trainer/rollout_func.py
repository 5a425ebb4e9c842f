"""Episodes with tools for TRL's own `GRPOTrainer`, over its public argument `rollout_func`.

    with rollout_func(tools="my_tools.py", max_turns=4) as episodes:
        GRPOTrainer(model, reward, GRPOConfig(...), rows, rollout_func=episodes).train()

The trainer is TRL's, of any subclass. It gets exact tokens, a mask of what the model sampled and
log-probabilities; tools run in workers as here. Reward functions find whole episodes in the argument
`trajectories`: `completions` are what TRL decodes, one message each.

An episode that a tool dropped has no reward, unless that is a model's.

Not over this argument: columns of a row but its prompt, the shared training pass, rollouts ahead, replaced
groups, checkpoints of the engine's sampling, and the report. `ToolGRPOTrainer` has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from toolgrpo.build import Parts
from toolgrpo.engines.base import Sleeper
from toolgrpo.engines.policy import Policy
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.rollout import Rollouts
from toolgrpo.tools import open_tools
from toolgrpo.trainer.assembly import Tools
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.hardware import check_backend
from toolgrpo.trainer.trl import batch as trl_batch
from toolgrpo.trainer.trl import trainer as trl_trainer


class RolloutFunc:
    """The callable of one trainer; it opens tools and engine at the first call."""

    def __init__(self, tools: Tools | None, options: dict[str, Any]) -> None:
        self._tools = tools
        self._options = options
        self._opened = ExitStack()
        self._rollouts: Rollouts | None = None
        self._policy: Policy | None = None
        self._config: ToolGRPOConfig | None = None
        self._loaded: tuple[Any, int] | None = None  # the run, by its state, and the step whose weights the engine has

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run an episode per prompt with the trainer's weights, in TRL's form."""
        if self._rollouts is None or self._policy is None or self._config is None:
            self._policy, self._config, self._rollouts = self._open(trainer)
            trainer.reward_funcs[:] = map(_without_dropped, trainer.reward_funcs)
        step, mode = int(trainer.state.global_step), trl_trainer.mode_of(trainer)
        gave_up = isinstance(self._rollouts.engine, Sleeper) and self._rollouts.engine.needs_weights
        known = self._loaded is not None and self._loaded[0] is trainer.state and self._loaded[1] == step
        if gave_up or not known or mode == "eval":  # which may be of the best step, not of the last
            self._rollouts.engine.load_weights(self._policy.weights())
            self._loaded = trainer.state, step
        rows = [{"prompt": prompt} for prompt in prompts]
        size = trl_trainer.group_size(trainer, mode)
        batch = self._rollouts.run(rows, self._config.sampling_options(), step=step, mode=mode, group_size=size)
        return trl_batch.as_rollout_func(batch.trajectories, trl_trainer.pad_id(trainer))

    def close(self) -> None:
        """End the engine and the tool workers. Safe to call twice."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self, trainer: Any) -> tuple[Policy, ToolGRPOConfig, Rollouts]:
        if trainer.use_vllm:
            raise ConfigError(
                "rollout_func starts its own engine, and TRL's trainer would start a second one: leave use_vllm out "
                "(rollout_func(tools, engine='vllm_colocate') says which)"
            )
        config = ToolGRPOConfig.of_trl(trainer.args, **self._options)
        if config.context is not None:
            raise ConfigError(
                "context makes an episode several sequences, and TRL's trainer reads it as one; leave it out, or use "
                "ToolGRPOTrainer"
            )
        toolbox = open_tools(self._tools, tool_timeout_s=config.tool_timeout)
        if toolbox is not None and toolbox is not self._tools:
            self._opened.callback(toolbox.close)
        backend = check_backend(trainer.accelerator, n_gpus=torch.cuda.device_count())
        policy = trl_trainer.policy_of(trainer, backend)
        parts = Parts.of(config, trainer.processing_class, toolbox=toolbox).with_model(policy)
        built = parts.open_engine((trainer.train_dataset, trainer.eval_dataset))
        self._opened.callback(built.engine.shutdown)
        return policy, config, parts.rollouts(built.engine)


def _without_dropped(reward: Any) -> Any:
    """Return the reward with None for episodes that were dropped: TRL leaves such out of the mean of their group."""
    if isinstance(reward, torch.nn.Module):
        return reward

    def kept(scores: Any, episodes: Sequence[Trajectory]) -> list[Any]:
        return [None if one.dropped else score for one, score in zip(episodes, scores, strict=True)]

    async def asked(*, trajectories: Sequence[Trajectory], **given: Any) -> list[Any]:
        return kept(await reward(trajectories=trajectories, **given), trajectories)

    def called(*, trajectories: Sequence[Trajectory], **given: Any) -> list[Any]:
        return kept(reward(trajectories=trajectories, **given), trajectories)

    asks = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))
    return asked if asks else called


def rollout_func(tools: Tools | None = None, **options: Any) -> RolloutFunc:
    """Return a `rollout_func` for TRL's `GRPOTrainer` that plays episodes with these tools.

    Args:
        tools: As for `ToolGRPOTrainer`: a file, a module, a list of functions or a `Toolbox`.
        options: Fields of `ToolGRPOConfig` about episodes and engines (`max_turns`, `engine`, ...).
    """
    return RolloutFunc(tools, options)
