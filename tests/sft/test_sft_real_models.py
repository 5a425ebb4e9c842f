"""Supervised training of any model: TRL trains on exactly our tokens and labels, with what TRL can do."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.nano.training import SupervisedLoss, collate
from toolgrpo.chat.encoding import spelled_markers
from toolgrpo.commands import sft
from toolgrpo.commands.main import read
from toolgrpo.commands.sft import CardedSFTTrainer, SFTResult, run_sft, sft_arguments
from toolgrpo.errors import ConfigError, DataError, PluginError
from toolgrpo.sft.encoder import ConversationEncoder
from toolgrpo.tools import load_tools

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
ROWS = ROOT / "recipes" / "data" / "tool_calls_12.jsonl"
TOOLS = ROOT / "tools_funcs" / "math_tools.py"
LEARNS = ("--batch_size", "8", "--micro_batch_size", "4", "--learning_rate", "0.01")


@pytest.fixture(scope="module")
def schemas() -> Any:
    with load_tools(TOOLS) as toolbox:
        return toolbox.schemas


def flags(base: Path, out: Path, *more: str) -> list[str]:
    given = ("--model_name_or_path", base, "--dataset_id_or_path", ROWS, "--output_dir", out, "--tools_script", TOOLS)
    return [*map(str, given), "--use_cpu", "true", *more]


def taught(base: Path, out: Path, *more: str) -> tuple[SFTResult, str]:
    text = io.StringIO()
    result = run_sft(*sft_arguments(read("sft", flags(base, out, *more))), Console(file=text, width=200))
    return result, text.getvalue()


@pytest.fixture(scope="module")
def after_a_step(mini_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CardedSFTTrainer, Path]:
    """The trainer of one step, and where its model is."""
    made: list[CardedSFTTrainer] = []

    class Remembered(CardedSFTTrainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            made.append(self)

    folder: Path = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "CardedSFTTrainer", Remembered)
        taught(mini_nano, folder, "--max_steps", "1", "--batch_size", "2", "--save_steps", "1")
    return made[0], folder


def test_trl_is_given_our_tokens_and_our_mask(mini_nano: Path, after_a_step: Any, schemas: Any) -> None:
    trainer, _ = after_a_step
    encode = ConversationEncoder(AutoTokenizer.from_pretrained(mini_nano))
    for line, row in zip(ROWS.read_text().splitlines(), trainer.train_dataset, strict=True):
        example = encode(json.loads(line)["messages"], schemas)
        assert tuple(row["input_ids"]) == example.ids
        learnt = [token if bit else -100 for token, bit in zip(example.ids, example.mask, strict=True)]
        assert row["labels"] == learnt
    first, second = trainer.train_dataset[0], trainer.train_dataset[1]
    batch = trainer.data_collator([first, second])
    assert batch["labels"].shape == batch["input_ids"].shape
    assert batch["labels"][0].tolist()[: len(first["labels"])] == first["labels"]


def test_the_card_says_what_was_taught_and_its_lines_run(
    mini_nano: Path,
    after_a_step: Any,
    schemas: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, folder = after_a_step
    card = (folder / "README.md").read_text()
    assert all(said in card for said in (f"`{mini_nano}`", "for 1 steps", f"{ROWS}, 12 conversations", "- sft"))
    assert "[None]" not in card and "rewards:" not in card
    assert json.loads((folder / "tools.json").read_text()) == schemas
    monkeypatch.chdir(folder)
    code = card.split("```python\n")[1].split("```")[0].replace("max_new_tokens=256", "max_new_tokens=4")
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out


def test_what_conversations_begin_with_is_read_once_and_the_losses_are_trls(mini_nano: Path, tmp_path: Path) -> None:
    def run(mode: str) -> tuple[Any, list[dict[str, float]]]:
        words = (*LEARNS, "--max_steps", "3", "--save_steps", "3", "--prefix_sharing", mode)
        losses = taught(mini_nano, tmp_path / mode, *words)[0].losses
        state = json.loads((tmp_path / mode / "checkpoint-3" / "trainer_state.json").read_text())
        return losses, state["log_history"][:3]

    (shared, logs), (padded, logs_padded) = run("on"), run("off")
    assert shared == pytest.approx(padded, rel=1e-4) and shared[2] < shared[0]
    for one, other in zip(logs, logs_padded, strict=True):
        for name in ("entropy", "mean_token_accuracy", "grad_norm", "num_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-3), name


def test_a_chat_model_learns_with_its_markers_spelled_and_can_be_loaded(
    mini_nano: Path, tmp_path: Path, schemas: Any
) -> None:
    _, said = taught(mini_nano, tmp_path, *LEARNS, "--max_steps", "12", "--call_markers", "spelled")
    assert "in ordinary pieces" in said and "12 conversations" in said and "step 12 of 12" in said
    assert "<tool_call>" in spelled_markers(AutoTokenizer.from_pretrained(tmp_path))
    losses = []
    for folder in (mini_nano, tmp_path):
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        encode = ConversationEncoder(tokenizer)
        examples = [encode(json.loads(line)["messages"], schemas) for line in ROWS.read_text().splitlines()]
        losses.append(SupervisedLoss(model)(collate(examples, tokenizer.pad_token_id)).item())
    assert losses[1] < 0.7 * losses[0]


def test_lora_bf16_checkpointing_and_a_resumed_run_are_as_one(mini_nano: Path, tmp_path: Path) -> None:
    options = (
        *("--use_peft", "true", "--lora_r", "4", "--bf16", "true", "--gradient_checkpointing", "true"),
        *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--save_steps", "2"),
        *("--learning_rate", "0.01", "--lr_scheduler_type", "constant", "--max_steps", "4"),
    )
    whole, said = taught(mini_nano, tmp_path / "whole", *options)
    assert "bf16 mixed precision" in said and "the adapter is in" in said and len(whole.losses) == 4
    assert whole.losses[-1] < whole.losses[0]
    (tmp_path / "whole" / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    (tmp_path / "whole" / "checkpoint-9").mkdir()  # one that was killed while it was written
    resumed, said = taught(mini_nano, tmp_path / "whole", *options, "--resume_from_checkpoint", "auto")
    assert "resuming from" in said and "checkpoint-2" in said
    assert resumed.losses == whole.losses
    folders = (tmp_path / "checkpoint-4", resumed.folder)
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)


class _InterruptedAtStepOne(io.StringIO):
    """Gets Ctrl-C once, where the first step is shown."""

    interrupted = False

    def write(self, text: str) -> int:
        if not self.interrupted and "sft: step 1 of 5" in text:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


DESK = """
class Desk:
    def reset(self, **row: object) -> None: ...
    def order(self, number: int) -> str:
        "Look an order up."
        return "x"
"""


def test_ctrl_c_saves_the_step_and_the_command_that_is_shown_goes_on(mini_nano: Path, tmp_path: Path) -> None:
    out, shown = tmp_path / "out", _InterruptedAtStepOne()
    environment = tmp_path / "desk.py"
    environment.write_text(DESK)
    more = ("--environment", f"{environment}:Desk", "--system_prompt", "Be short.", "--max_steps", "5")
    argv = flags(mini_nano, out, *more)
    result = run_sft(*sft_arguments(given := read("sft", argv)), Console(file=shown, width=200), given)
    command = f"toolgrpo sft --config {out / 'run.yaml'} --resume_from_checkpoint auto"
    assert "stopped by SIGINT after step 2, which is saved" in shown.getvalue() and command in shown.getvalue()
    assert "s left" in shown.getvalue() and len(result.losses) == 2 and (out / "model.safetensors").is_file()
    names = [tool["function"]["name"] for tool in json.loads((out / "tools.json").read_text())]
    assert {"add", "order"} <= set(names) and '"Be short."' in (out / "README.md").read_text()
    resumed = run_sft(*sft_arguments(read("sft", command.split()[2:])), Console(file=io.StringIO(), width=200))
    assert len(resumed.losses) == 5 and resumed.losses[:2] == result.losses


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (("--batch_size", "5", "--micro_batch_size", "2"), ConfigError, "5 is not a multiple of the 2"),
        (("--packing", "true"), ConfigError, "packing"),
        (("--chat_template_path", "x.jinja"), ConfigError, "chat_template_path would be saved"),
        (("--learning_rate", "0"), ConfigError, "learning_rate"),
        (("--max_length", "20"), DataError, r"conversation 1 has \d+ tokens, but max_length is 20"),
        (("--resume_from_checkpoint", "nowhere"), ConfigError, "nowhere"),
        (("--tools_script", "none.py"), PluginError, "none.py"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    mini_nano: Path, tmp_path: Path, more: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        taught(mini_nano, tmp_path, *more)


RECIPES = sorted((ROOT / "recipes" / "configs" / "sft").glob("*.yaml"))
ON_A_CPU = ("smollm2_135m",)  # small models, with all their weights


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.stem)
def test_a_recipe_can_be_read(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    here = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    sft, config, model = sft_arguments(read("sft", ["--config", str(recipe), *here]))
    assert Path(str(sft.dataset_id_or_path)).is_file()
    assert config.gradient_checkpointing == model.use_peft == (recipe.stem not in ON_A_CPU)
    assert PartialState().device.type == "cpu"
