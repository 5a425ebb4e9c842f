"""The HTML report: one file that shows the episodes, rewards and learning of a run.

`files.py` reads OUTPUT_DIR one step at a time, `episode_data.py` makes what the page needs of an
episode, `build.py` what the charts need of a step, `html.py` writes the file, `live.py` serves
it while a run goes on. The page itself is in `page/`: plain JavaScript, no build step.

It reads files and nothing else: no model, no tokenizer, no trainer.
"""
