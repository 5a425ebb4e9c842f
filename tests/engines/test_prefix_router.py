import random

from toolgrpo.engines.prefix_router import PrefixRouter


def _stream(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_turns_of_an_episode_stay_where_they_began() -> None:
    router = PrefixRouter(3)
    conversation = _stream(1, 200)
    home = router.choose(conversation)
    for other in range(20):  # others come and go, and keep the home busy
        router.choose(_stream(100 + other, 150))
    router.open_requests[home] = 5
    for _ in range(4):
        conversation = conversation + _stream(len(conversation), 70)
        assert router.choose(conversation) == home


def test_the_episodes_of_a_group_share_a_server_until_it_is_overloaded() -> None:
    router = PrefixRouter(2)
    prompt = _stream(2, 320)
    chosen = []
    for _ in range(30):
        server = router.choose(prompt)
        router.open_requests[server] += 1
        chosen.append(server)
    assert chosen[:8] == [chosen[0]] * 8
    assert set(chosen) == {0, 1}


def test_prompts_that_share_only_a_system_prompt_spread() -> None:
    router = PrefixRouter(4)
    system = _stream(3, 128)
    for task in range(40):
        router.open_requests[router.choose(system + _stream(1000 + task, 160))] += 1
    assert router.open_requests == [10, 10, 10, 10]


def test_a_server_that_is_down_is_avoided_unless_all_are() -> None:
    router = PrefixRouter(2)
    conversation = _stream(4, 100)
    home = router.choose(conversation)
    other = 1 - home
    assert router.choose(conversation, avoid={home}) == other
    assert router.choose(conversation) == other  # that is where its prefix is now
    assert router.choose(conversation, avoid={0, 1}) in (0, 1)


def test_short_prompts_go_to_the_least_busy_server() -> None:
    router = PrefixRouter(3)
    router.open_requests = [2, 0, 1]
    assert router.choose([1, 2, 3]) == 1
