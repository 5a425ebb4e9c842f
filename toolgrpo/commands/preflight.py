"""Look at a job before anything is drawn: all of `--dry_run`, and the beginning of `toolgrpo check`.

Rewards are asked about episodes that were made up, and what a training takes is compared with what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from datasets import Dataset

from confined_python import choose_rung
from toolgrpo.commands.check_lines import CheckReport, add_prompts
from toolgrpo.commands.job import Job
from toolgrpo.commands.terminal import Terminal
from toolgrpo.errors import SandboxError, ToolGRPOError
from toolgrpo.evaluation.before_training import WRITINGS, nonsense, rehearse, score_made_up
from toolgrpo.observe.trackers import has_wandb_login
from toolgrpo.rewards import Reward, check_gold
from toolgrpo.rewards.judge import Judge
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trainer.memory import Estimate
from toolgrpo.trainer.trainer import ToolGRPOTrainer

_OF_REAL_ONES = (
    "Ignore this line if the reward wants another form: the samples of toolgrpo check show its rewards of real episodes"
)
ROWS_LOOKED_AT = 200  # of gold answers and prompts
_GIB = 2**30


class Preflight:
    """Looks at a job, and collects what it finds in a report."""

    def __init__(self, job: Job, terminal: Terminal | None = None) -> None:
        self.job = job
        console = (terminal or job.terminal).console
        self.report = CheckReport(lambda line: console.print(line.shown()))

    def before_model(
        self,
        rows: Dataset,
        tools: ToolProvider | None,
        rewards: Sequence[Reward],
        heldout: Dataset | None = None,
        *,
        most: int | None = None,  # of the rows whose gold answers are scored
    ) -> None:
        """Open an episode's tools, and ask the rewards about episodes that were made up."""
        by_agent = self.job.script.agent is not None
        for some in (rows, heldout):
            if some is not None:
                rehearse(some, tools, rewards, self.job.config.reward_weights, by_agent=by_agent)
        some = rows if most is None else rows.select(range(min(len(rows), most)))
        for reward in rewards:
            if isinstance(reward.function, Judge):
                self.report.add("reward", **reward.function.agreement())
            checked = check_gold(some, reward)
            if checked is not None:
                said = f"{reward.name}: the gold answers of {checked} rows get full marks"
                self.report.add("reward", said, rows=checked)
        if all(isinstance(reward.function, Judge) for reward in rewards):
            return self._sandbox(rewards)  # an episode that is made up has no siblings
        try:
            self.made_up(list(some.select(range(min(len(some), 20)))), rewards, calls=tools is not None or by_agent)
        except ToolGRPOError as error:
            said = f"cannot be tried on a made-up episode: {error}"
            self.report.add("reward", said, warning="If real episodes have what it needs, nothing is wrong")
        self._sandbox(rewards)

    def with_model(self, trainer: ToolGRPOTrainer, rows: Dataset, heldout: Sequence[Mapping[str, Any]] = ()) -> None:
        """Compare what the training takes with what there is: memory, the window of the engine, logins."""
        self.add_memory(self.job.estimate_of(trainer, rows, heldout))
        some, prompts = rows.select(range(min(len(rows), ROWS_LOOKED_AT))), trainer.parts.prompts
        lengths = [prompts.length(row, prompts.schemas(row)) for row in some]
        add_prompts(self.report, lengths, trainer.engine.max_model_len, trainer.args.episode_limits())
        if "wandb" in trainer.args.report_to and not has_wandb_login():
            said = "wandb has no login here, so a run would continue without it"
            self.report.add("trackers", said, warning="Run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")

    def made_up(self, rows: list[dict[str, Any]], rewards: Sequence[Reward], *, calls: bool) -> None:
        """Compare the scores of gold answers, however they may be written, with that of nonsense."""
        weights, threshold = self.job.config.reward_weights, self.job.config.success_threshold

        def mean(write: Any) -> float | None:
            totals = [one for one in score_made_up(rows, write, rewards, weights, threshold).totals if one is not None]
            return fmean(totals) if totals else None

        bad = mean(nonsense)
        has_gold = all(row.get("answer") is not None for row in rows)
        means = {how: mean(write) for how, write in WRITINGS.items()} if has_gold else {}
        scored = [(one, how) for how, one in means.items() if one is not None]
        numbers: dict[str, Any] = {} if bad is None else {"bad": bad}
        of_nonsense = "None" if bad is None else f"{bad:.2f}"
        if not scored:
            gold = "gold answers score None" if has_gold else "there are no gold answers to compare"
            warning = _OF_REAL_ONES if has_gold else ""
            self.report.add("reward", f"nonsense scores {of_nonsense}; {gold}", warning=warning, **numbers)
            return
        good, how = max(scored)
        said = f"the best gold answers ({how}) score {good:.2f}, nonsense {of_nonsense}"
        failure = warning = ""
        if good == bad == 0 and calls:
            warning = "These answers call no tool: fine if only a call earns something, which the samples of toolgrpo check show"
        elif good == bad:
            warning = f"We write gold answers {', '.join(WRITINGS)}. {_OF_REAL_ONES}"
        elif bad is not None and bad > good:
            failure = "A reward that gives nonsense more teaches nonsense"
        elif good < threshold and "gold_calls" not in [reward.name for reward in rewards]:
            # with gold_calls it is as it should be: these answers call nothing
            said += f": below success_threshold {threshold:g}"
            warning = "Fine if full marks need more than the answer, such as certain calls"
        self.report.add("reward", said, warning=warning, failure=failure, good=good, **numbers)

    def _sandbox(self, rewards: Sequence[Reward]) -> None:
        try:
            rung, said = choose_rung("auto", allow_unsafe=False)
            self.report.add("sandbox", said.removeprefix("sandbox "), rung=rung.value)
        except SandboxError as error:
            if any(reward.name == "code_exec" for reward in rewards):
                raise
            self.report.add("sandbox", str(error), warning="It matters only to tools and rewards that run code")

    def add_memory(self, found: Estimate) -> None:
        """Add the estimate: a failure where no length of the episodes would help."""
        warning = "Shorter episodes, fewer at a time, --use_peft, or --vllm_enable_sleep_mode" if not found.fits else ""
        failure = "Use --use_peft, ZeRO or FSDP, or a smaller model" if found.fixed > found.there else ""
        sizes = {"needed": found.needed, "there": found.there, **found.parts}
        numbers = {f"{name}_gib": size / _GIB for name, size in sizes.items()}
        self.report.add("memory", str(found), warning=warning, failure=failure, **numbers)
