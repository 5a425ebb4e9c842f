"""The HTML report: one file that shows the episodes, rewards and learning of a run.

`files.py` reads OUTPUT_DIR one step at a time, `episode_data.py` prepares an episode for the
page, `build.py` prepares a step for the charts, `html.py` writes the file, and `live.py` serves
it during a run. The page itself is in `page/`: plain JavaScript, no build step.

It only reads files; it needs no model, tokenizer or trainer.
"""
