"""Half for the right answer, a quarter for the right tools, a quarter for calls that all worked."""

from toolgrpo.rewards import calls, final_answer


def reward_func(completions, answer, expected_tools, trajectories, log_metric, **kwargs):
    scores, ordered = [], 0
    for completion, right, tools, trajectory in zip(completions, answer, expected_tools, trajectories, strict=True):
        made = calls(trajectory)
        said = final_answer(completion).strip() == right
        chosen = [call.name for call in made] == list(tools)
        worked = bool(made) and all(call.ok for call in made)
        scores.append(0.5 * said + 0.25 * chosen + 0.25 * worked)
        ordered += "order" in [call.name for call in made]
    log_metric("shop/ordered", ordered / len(scores))
    return scores
