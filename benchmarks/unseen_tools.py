"""Tools that a model was not trained with: held-out tools, not only held-out questions.

    python benchmarks/unseen_tools.py                                  # nano in every way, seed 42: an hour on two cores
    python benchmarks/unseen_tools.py --ways base own --seeds 42 1 2   # some of them
    python benchmarks/unseen_tools.py --ways smollm2_shown smollm2 --seeds 1
    python benchmarks/unseen_tools.py --ways smollm2_more_shown smollm2_many_shown smollm2_many
    python benchmarks/unseen_tools.py --quick                          # two steps each, 16 questions

Models are trained in several ways, and each result is asked 240 questions (SmolLM2: 120) with tools of each of six kinds
(greedy), by `toolgrpo evaluate --tools_script FILE`, where each row names the tools that it is offered:

    seen       the four tools of the embedded job          renamed    sets of names that no demonstration showed together
    reordered  tools and parameters in another order,      unheard    the four operations under words it never read
               parameters under other names
    new        other operations (remainder, maximum, ...)    invented   other operations, names that mean nothing

    base       nano as it is built
    own        `toolgrpo train` with the embedded job's tools
    names      the same with tools whose names and parameters are drawn for each row, of those in nano's demonstrations
    warm_8     supervised training first, on 8 invented tools, four of them offered a row
    warm_400   the same on 400 invented tools
    wide       `warm_400`, then `toolgrpo train` on questions for the 400
    smollm2_shown, smollm2
               a real language model after its 96 worked questions, and after GRPO, with the embedded job's tools alone
               (`real_model.py`, whose models are used if they are there)
    smollm2_more_shown
               the same shown 192 more worked questions, of its four tools
    smollm2_many_shown, smollm2_many
               shown 192 more of 400 invented tools instead, and after GRPO on questions for those

Questions for tools of other operations name their tool ("Find the remainder of 17 and 5."). Models are kept in --work and
used again. Writes benchmarks/results/unseen_tools.json after each model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_model
import yaml
from _reporting import STAMP, progress, result_file, save
from _rows import Figure, Row
from _tool_families import (
    conversations,
    in_files,
    invented,
    questions,
    sets_of_names,
    suites,
    synonyms,
    write,
)

from recipes.nano.toolsets import CANONICAL

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "toolgrpo")
CONFIG = "recipes/configs/nano.yaml"
LIMIT_S = real_model.TIME_LIMIT_S
N_FEW, N_MANY = 8, 400
OWN = [tool.schema for tool in CANONICAL]
N_SHOWN = 192  # more, to SmolLM2
N_CONVERSATIONS = 6000
Sizes = dict[str, int]
WHOLE: Sizes = {"questions": 240, "steps": 110, "conversations": N_CONVERSATIONS, "batch": 64}
QUICK: Sizes = {"questions": 16, "steps": 2, "conversations": 64, "batch": 16}


def run(*arguments: str | Path) -> None:
    """Run a command of the package; what it said is in the error."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(
            f"toolgrpo {arguments[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def train(model: str, tools: Path, rows: Path, folder: Path, seed: int, sizes: Sizes) -> str:
    """Train as `make train` does, with other tools and rows."""
    run(
        *("train", "--config", CONFIG, "--model_name_or_path", model, "--output_dir", folder, "--seed", str(seed)),
        *("--tools_script", tools, "--dataset_id_or_path", rows, "--eval_questions", "0"),
        *("--max_steps", str(sizes["steps"]), "--per_device_train_batch_size", str(sizes["batch"])),
    )
    return str(folder)


def own(work: Path, seed: int, sizes: Sizes) -> str:
    return train(
        "nano", ROOT / "tools_funcs" / "arithmetic_tools.py", Path("arithmetic"), work / f"own-{seed}", seed, sizes
    )


def names(work: Path, seed: int, sizes: Sizes) -> str:
    """Rows that each bring a name for each operation, in the sets that demonstrations may show."""
    from recipes.nano.toolsets import is_held_out
    from toolgrpo.data.arithmetic import arithmetic_rows

    asked = arithmetic_rows("train", 2000, seed=seed)
    drawn = sets_of_names(len(asked), f"training {seed}", lambda names: not is_held_out(names))
    rows = [{**row, "tools": offered} for row, offered in zip(asked, drawn, strict=True)]
    return train(
        "nano", *write(work / "data", f"names-{seed}", synonyms(seed), rows), work / f"names-{seed}", seed, sizes
    )


def schemas_of(plugin: Path) -> dict[str, Any]:
    """What a tools file tells a model, by tool."""
    from toolgrpo.tools import load_tools

    with load_tools(str(plugin)) as toolbox:
        return dict(zip(toolbox.names, toolbox.schemas, strict=True))


def shuffled_into(data: Path, rows: list[dict[str, Any]], seed: int) -> Path:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def warmed(n_tools: int) -> Callable[[Path, int, Sizes], str]:
    def warm(work: Path, seed: int, sizes: Sizes) -> str:
        """Two thirds are questions for invented tools, a third are nano's own, without its bad habits."""
        tools = invented(n_tools, seed)
        rows = questions(tools, sizes["conversations"] * 2 // 3, f"warm {seed}")
        plugin, _ = write(work / "data", f"invented-{n_tools}-{seed}", tools, rows)
        taught = conversations(tools, rows, schemas_of(plugin)) + demonstrations(sizes["conversations"] // 3, seed)
        data = shuffled_into(work / "data" / f"warm-{n_tools}-{seed}.jsonl", taught, seed)
        folder = work / f"warm-{n_tools}-{seed}"
        run(
            *("sft", "--model_name_or_path", "nano", "--dataset_id_or_path", data, "--output_dir", folder),
            *("--batch_size", "16", "--num_train_epochs", "1", "--seed", str(seed), "--save_strategy", "no"),
            *(
                "--report_to",
                "none",
                "--lr_scheduler_type",
                "linear",
                "--warmup_steps",
                "10",
                "--learning_rate",
                "2e-3",
            ),
        )
        return str(folder)

    return warm


def demonstrations(n: int, seed: int) -> list[dict[str, Any]]:
    from recipes.nano.demonstrations import demonstrate, draw_training_problem
    from recipes.nano.toolsets import draw_toolset

    rng = random.Random(seed)
    made = []
    for _ in range(n):
        tools = draw_toolset(rng, 0.3)
        messages = demonstrate(draw_training_problem(rng, rng.randint(1, 3)), tools, rng, None)
        made.append({"messages": messages, "tools": [tool.schema for tool in tools]})
    return made


def many(work: Path, seed: int) -> tuple[Path, Path]:
    """Many tools, and questions for them."""
    tools = invented(N_MANY, seed)
    return write(work / "data", f"wide-{seed}", tools, questions(tools, 2000, f"reinforced {seed}"))


def wide(work: Path, seed: int, sizes: Sizes) -> str:
    model = model_of(f"warm_{N_MANY}", work, seed, sizes)
    return train(model, *many(work, seed), work / f"wide-{seed}", seed, sizes)


def smollm2_shown(work: Path, seed: int, sizes: Sizes) -> str:
    return str(real_model.shown(real_model.kept_in(sizes == QUICK) / "shown"))


def smollm2(work: Path, seed: int, sizes: Sizes) -> str:
    quick = sizes == QUICK
    folder = real_model.kept_in(quick) / f"seed{seed}"
    real_model.trained(Path(smollm2_shown(work, seed, sizes)), seed, folder, quick)
    return str(folder)


def shown_more(name: str, more: Callable[[Path, int], list[dict[str, Any]]]) -> Callable[[Path, int, Sizes], str]:
    """Show SmolLM2 the recipe's worked questions and more of them, each once, in any order."""

    def shown(work: Path, seed: int, sizes: Sizes) -> str:
        folder, data = work / f"{name}-{seed}", work / "data"
        recipe = yaml.safe_load((ROOT / real_model.SHOWN_BY).read_text())
        of_the_recipe = [json.loads(line) for line in (ROOT / real_model.EXAMPLES).read_text().splitlines()]
        taught = list(map(without_thoughts, more(data, seed))) + [{**row, "tools": OWN} for row in of_the_recipe]
        rows, config = shuffled_into(data / f"{name}-{seed}.jsonl", taught, seed), data / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**recipe, "data": {"dataset_id_or_path": str(rows)}}))
        steps = 2 if sizes == QUICK else len(taught) // recipe["training"]["batch_size"]
        run("sft", "--config", config, "--output_dir", folder, "--max_steps", str(steps), "--seed", str(seed))
        return str(folder)

    return shown


def of_its_own(data: Path, seed: int) -> list[dict[str, Any]]:
    from recipes.nano.demonstrations import demonstrate, draw_training_problem

    rng = random.Random(seed)
    problems = [draw_training_problem(rng, 1 + number % 3) for number in range(N_SHOWN)]
    return [{"messages": demonstrate(one, CANONICAL, rng, None), "tools": OWN} for one in problems]


def of_many(data: Path, seed: int) -> list[dict[str, Any]]:
    tools = invented(N_MANY, seed)
    asked = questions(tools, N_SHOWN, f"shown {seed}")
    plugin, _ = write(data, f"shown-{seed}", tools, asked)
    return conversations(tools, asked, schemas_of(plugin))


def without_thoughts(row: dict[str, Any]) -> dict[str, Any]:
    """Nano names its tool before it calls; a model that does not is not taught to."""
    spoken = [{key: said for key, said in one.items() if key != "reasoning_content"} for one in row["messages"]]
    return {**row, "messages": spoken}


def smollm2_many(work: Path, seed: int, sizes: Sizes) -> str:
    model = model_of("smollm2_many_shown", work, 0, sizes)
    plugin, rows = many(work, 0)
    folder = work / f"smollm2_many-{seed}"
    run(
        *("train", "--config", real_model.CONFIG, "--model_name_or_path", model, "--output_dir", folder),
        *("--tools_script", plugin, "--dataset_id_or_path", rows, "--eval_questions", "0", "--seed", str(seed)),
        *(real_model.TWO_STEPS if sizes == QUICK else ()),
    )
    return str(folder)


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is made, how it is asked, and what it is better than."""

    make: Callable[[Path, int, Sizes], str]
    base: str = "base"
    config: str = CONFIG
    asking: tuple[str, ...] = ("--engine", "transformers")
    part: int = 1  # of the questions, one in so many

    @classmethod
    def of_smollm2(cls, make: Callable[[Path, int, Sizes], str], base: str = "smollm2_shown") -> Way:
        return cls(make, base, config=real_model.CONFIG, asking=(), part=2)


WAYS = {
    "base": Way(lambda work, seed, sizes: "nano"),
    "own": Way(own),
    "names": Way(names),
    f"warm_{N_FEW}": Way(warmed(N_FEW)),
    f"warm_{N_MANY}": Way(warmed(N_MANY)),
    "wide": Way(wide),
    "smollm2_shown": Way.of_smollm2(smollm2_shown),
    "smollm2": Way.of_smollm2(smollm2),
    "smollm2_more_shown": Way.of_smollm2(shown_more("smollm2_more_shown", of_its_own), base="smollm2_more_shown"),
    "smollm2_many_shown": Way.of_smollm2(shown_more("smollm2_many_shown", of_many), base="smollm2_many_shown"),
    "smollm2_many": Way.of_smollm2(smollm2_many, base="smollm2_many_shown"),
}
OF_NANO = [name for name, way in WAYS.items() if way.config == CONFIG]  # they need no further package
UNTRAINED = {way.base for way in WAYS.values()}  # no seed changes them


def model_of(way: str, work: Path, seed: int, sizes: Sizes) -> str:
    """Return the model of a way; one that is there already is used again."""
    kept = work / f"{way}-{seed}.made"
    if not kept.exists():
        progress(f"{way}, seed {seed}: training")
        folder = WAYS[way].make(work, seed, sizes)
        work.mkdir(parents=True, exist_ok=True)
        kept.write_text(folder)
    return kept.read_text()


def measured(model: str, way: Way, folder: Path, n: int) -> dict[str, Any]:
    """Return the success with each suite's tools, with its interval."""
    found: dict[str, Any] = {}
    for name, tools, asked in in_files(suites(n)):
        plugin, data = write(folder, name, tools, asked)
        out = folder / name
        run(
            *("evaluate", "--config", way.config, "--model_name_or_path", model, "--tools_script", plugin),
            *("--eval_dataset_id_or_path", data, "--eval_questions", str(len(asked)), "--temperature", "0"),
            *("--samples", "1", "--output_dir", out),
            *way.asking,
        )
        for suite, said in json.loads((out / "evaluation.json").read_text())["model"]["by_task"].items():
            found[suite] = {**said["pass@1"], "questions": said["questions"]}
            print(f"    {suite:10} {found[suite]['value']:.3f} {found[suite]['interval']}", flush=True)
    return {suite.name: found[suite.name] for suite in suites(1)}


def figure(share: dict[str, Any]) -> Figure:
    least, most = share["interval"]
    return Figure(share["value"], least, most, share["questions"])


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for key, one in results["models"].items():
        way, _, seed = key.partition("-")
        base = WAYS[way].base
        of_base = results["models"].get(f"{base}-0", {}).get("success", {})
        for suite, share in one["success"].items():
            before = of_base.get(suite) if way not in UNTRAINED else None
            made.append(
                Row(
                    benchmark="unseen_tools",
                    what=f"{suite} tools, {way}" + ("" if way in UNTRAINED else f", seed {seed}"),
                    unit="",
                    ours=figure(share),
                    other=None if before is None else figure(before),
                    other_name="" if before is None else base,
                    more_is_better=True,
                )
            )
    return made


def show(models: dict[str, Any]) -> None:
    """Print the table: a row for each model, a column for each tools file."""
    columns = next(iter(models.values()))["success"]
    print(f"\n{'':14}" + "".join(f"{name:>24}" for name in columns))
    for key, one in models.items():
        cells = (f"{s['value']:.3f} [{s['interval'][0]:.3f}, {s['interval'][1]:.3f}]" for s in one["success"].values())
        print(f"{key:14}" + "".join(f"{cell:>24}" for cell in cells))


def earlier(quick: bool) -> dict[str, Any]:
    """Return what is there of the same form, so that ways can be measured one after the other."""
    kept = result_file("unseen_tools")
    found = json.loads(kept.read_text()) if kept.exists() else {}
    return dict(found["models"]) if found and found[STAMP]["quick"] == quick else {}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps each, 16 questions")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=OF_NANO, metavar="WAY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "unseen_tools", help="where models are kept")
    options = parser.parse_args(argv)
    sizes = QUICK if options.quick else WHOLE
    work = options.work.absolute() / ("quick" if options.quick else "whole")
    models = earlier(options.quick)
    for way in options.ways:
        for seed in options.seeds if way not in UNTRAINED else [0]:
            started = time.monotonic()
            model = model_of(way, work, seed, sizes)
            progress(f"{way}, seed {seed}: asking ({time.monotonic() - started:.0f} s)")
            asked = sizes["questions"] // WAYS[way].part
            success = measured(model, WAYS[way], work / "asked" / f"{way}-{seed}", asked)
            models[f"{way}-{seed}"] = {"success": success, "seconds": time.monotonic() - started}
            save("unseen_tools", {"models": models, "sizes": sizes}, quick=options.quick, number_type="float32")
    show(models)


if __name__ == "__main__":
    main()
