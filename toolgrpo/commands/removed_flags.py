"""Flags and YAML keys of earlier versions: one sentence each, saying what to use instead.

`given_words.py` answers with it where a flag or key is not known.
"""

from __future__ import annotations

_NO_ECHO = "no loss is taken on tool results; teach their form with `toolgrpo sft` on worked conversations"
_FILTER = "no row is drawn by how hard it is; ask `toolgrpo evaluate --report` and train on a filtered file"
_TWO_CREDITS = (
    "turns get their credit from turn_reward gold_call or environment, or from a turn_reward_fn; leave it out"
)
REMOVED: dict[str, str] = {
    "echo_weight": _NO_ECHO,
    "echo_tools": _NO_ECHO,
    **dict.fromkeys(("curriculum", "hard_up_to", "normal_up_to", "retire_after_solved", "row_weights"), _FILTER),
    **dict.fromkeys(("hard_weight", "normal_weight", "easy_weight", "unseen_weight"), _FILTER),
    **dict.fromkeys(("row_pass_k", "row_pass_min", "row_pass_max"), _FILTER),
    **dict.fromkeys(("credit_gamma", "anchor_weight", "info_gain_text"), _TWO_CREDITS),
    "oversample": "a step begins with its groups, and backfill draws others as soon as some are dead; leave it out",
    "correction_cap": "with geo_tis a token weighs at most 2; leave it out",
    "engine_retries": "a request that failed is tried three more times; leave it out",
    "correction_k3": "geo_tis keeps episodes by correction_band",
    "correction_band_tokens": "correction_band is for 1,000 tokens, and wider for fewer; leave it out",
    "text_prompts": "a prompt that is plain text is a user's message; to continue raw text, use TRL's GRPOTrainer",
    "profile": "use `toolgrpo report OUTPUT_DIR`, which draws the seconds of each phase of every step",
}
