"""The engine server on a real connection: the same turns as in process, vLLM's fields, limits, changes of weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_servers import MODEL, Serving, remote, serving
from tiny_models import VOCABULARY, tiny_model
from web_server import TOKEN

from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.engines.decode import Decoder
from mgrpo.engines.local import Local
from mgrpo.engines.remote import Remote
from mgrpo.engines.server import Limits
from mgrpo.errors import EngineError, EngineTimeout
from mgrpo.types import TrajectoryId
from mgrpo.web.asking import Client, Refused

STOP = 1


def local(seed: int = 0) -> Local:
    return Local(Decoder(tiny_model(seed=seed)))


def ask(index: int, prompt: Sequence[int], **sampling: Any) -> Request:
    options = {"max_tokens": 8, "seed": 7, **sampling}
    return Request(TrajectoryId(5, index, "planner", 0), tuple(prompt), Sampling(**options), (STOP,))


def first_round(**sampling: Any) -> list[Request]:
    return [ask(i, [(11 * i + j) % 60 + 2 for j in range(3 + 2 * i)], **sampling) for i in range(5)]


def with_server(engine: Any, work: Callable[[Serving], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with serving(engine, **options) as found:
            return await work(found)

    return asyncio.run(main())


async def several_turns(engine: Any, **sampling: Any) -> list[Completion]:
    """Three rounds; prompts grow by what was sampled, one trajectory is over after each, turns differ in length."""
    requests, found = first_round(**sampling), []
    for turn in range(3):
        requests = [
            replace(r, sampling=replace(r.sampling, max_tokens=3 + (turn + r.id.rollout) % 6)) for r in requests
        ]
        completions = await engine.generate(requests)
        found += completions
        engine.release(requests[0].id)
        grown = [
            replace(r, prompt_ids=(*r.prompt_ids, *c.token_ids, 3, 4))
            for r, c in zip(requests, completions, strict=True)
        ]
        requests = grown[1:]
    return found


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}], ids=str
)
def test_turns_over_http_are_those_in_process_to_the_last_bit(sampling: dict[str, Any]) -> None:
    inside = asyncio.run(several_turns(local(), **sampling))
    over_http = with_server(local(), lambda found: several_turns(remote(found), **sampling))
    assert over_http == inside  # floats too, by their bits
    assert len({len(completion.token_ids) for completion in inside}) > 2


def test_what_differs_within_a_batch_arrives_with_its_request() -> None:
    requests = [
        ask(0, [2, 3], temperature=0.0),
        ask(1, [2, 3], temperature=1.3, seed=8, max_tokens=2),
        ask(2, [2, 3], top_p=0.5, min_p=0.1),
        replace(ask(3, [2, 3], top_k=3), stop_ids=(STOP, 9, 11, 13)),
    ]
    inside = asyncio.run(local().generate(requests))
    assert with_server(local(), lambda found: remote(found).generate(requests)) == inside


def test_a_trajectory_that_begins_anew_finds_nothing_cached() -> None:
    """A collector that was killed and runs its groups again gets the turns of a run without the kill."""
    inside = asyncio.run(several_turns(local()))

    async def killed_and_resumed(found: Serving) -> list[Completion]:
        await remote(found).generate(first_round())
        await remote(found).generate([replace(r, prompt_ids=(*r.prompt_ids, 9, 9)) for r in first_round()])
        return await several_turns(remote(found))

    assert with_server(local(), killed_and_resumed) == inside


def test_a_second_client_with_the_same_trajectories_changes_no_bit_of_the_first_one_s_turns() -> None:
    """A collector whose lease was given away works on, and lets go, while its successor is in the middle of a turn."""
    inside = asyncio.run(several_turns(local()))

    async def both(found: Serving) -> list[Completion]:
        class Disturbed(Remote):
            async def generate(self, requests: Sequence[Request]) -> list[Completion]:
                other = remote(found)
                await other.generate(requests[::-1][:2])
                completions = await super().generate(requests)
                await other.generate(requests[1:])
                for request in requests:
                    other.release(request.id)
                await other.close()
                return completions

        first = remote(found)
        first.__class__ = Disturbed
        return await several_turns(first)

    assert with_server(local(), both) == inside


def test_released_trajectories_are_forgotten_by_the_server() -> None:
    engine = local()

    async def work(found: Serving) -> None:
        client = remote(found)
        await client.generate(first_round())
        assert len(engine._decoder._kept) == 5
        for request in first_round()[:3]:
            client.release(request.id)
        await client.generate(first_round()[4:])
        assert {id.rollout for id in engine._decoder._kept} == {3, 4}
        client.release(first_round()[4].id)
        await client.close()
        assert {id.rollout for id in engine._decoder._kept} == {3}

    with_server(engine, work)


def test_trajectories_without_a_collector_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgrpo.engines.server._IDLE_S", 0.0)
    engine = local()

    async def work(found: Serving) -> None:
        await remote(found).generate(first_round())
        await remote(found).generate([ask(9, [2, 3])])
        assert {id.rollout for id in engine._decoder._kept} == {9}

    with_server(engine, work)


# ---------------------------------------------------------------- changes of weights


def write_weights(folder: Path, seed: int) -> str:
    tiny_model(seed=seed).save_pretrained(folder)
    return str(folder)


def test_after_an_update_turns_are_a_cold_engines(tmp_path: Path) -> None:
    """R-56: a cached prefix does not survive new weights."""
    handle = write_weights(tmp_path, seed=1)
    cold = asyncio.run(local(seed=1).generate(first_round()))

    async def work(found: Serving) -> None:
        client = remote(found)
        before = await client.generate(first_round())
        await found.load(1, handle)
        after = await client.generate(first_round())
        assert [replace(c, version=0) for c in after] == cold != before
        assert {c.version for c in before} == {0} and {c.version for c in after} == {1}

    with_server(local(), work)


class Gate(Local):
    """Lets a batch into the decoder when it is told to."""

    def __init__(self) -> None:
        super().__init__(Decoder(tiny_model()))
        self.open, self.waiting = threading.Event(), threading.Event()

    def _decode(self, requests: Sequence[Request], abandoned: threading.Event) -> list[Completion]:
        self.waiting.set()
        assert self.open.wait(20)
        return super()._decode(requests, abandoned)


def test_tokens_have_the_version_that_decoded_them_not_that_of_their_request(tmp_path: Path) -> None:
    """R-54: weights change between send and receive; nothing fails and no batch mixes versions."""
    engine, handle = Gate(), write_weights(tmp_path, seed=1)

    async def work(found: Serving) -> None:
        client = remote(found)
        asked = asyncio.create_task(client.generate(first_round()))
        await asyncio.to_thread(engine.waiting.wait, 20)
        await found.load(1, handle)
        engine.open.set()
        assert [replace(c, version=0) for c in await asked] == await local(seed=1).generate(first_round())
        assert {c.version for c in await asked} == {1}

    with_server(engine, work)


def test_weights_that_change_while_many_ask(tmp_path: Path) -> None:
    handles = [write_weights(tmp_path / str(seed), seed) for seed in range(4)]
    expected = [asyncio.run(local(seed).generate(first_round())) for seed in range(4)]

    async def work(found: Serving) -> None:
        async def collect() -> list[list[Completion]]:
            client = remote(found, deterministic=False)
            return [await client.generate(first_round()) for _ in range(8)]

        async def update() -> None:
            for version in range(1, 4):
                await asyncio.sleep(0.05)
                await found.load(version, handles[version])

        *batches, _ = await asyncio.gather(collect(), collect(), collect(), update())
        for completions in [batch for several in batches for batch in several]:
            (version,) = {c.version for c in completions}
            ids = [c.token_ids for c in completions]
            assert ids == [c.token_ids for c in expected[version]]

    with_server(local(), work)


# ---------------------------------------------------------------- who gives up


class Slow:
    """An engine that takes one call at a time and never ends those of ``stuck`` prompts."""

    max_batch, max_calls = 256, 1

    def __init__(self) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.ended: list[tuple[int, ...]] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        prompt = requests[0].prompt_ids
        self.begun.append(prompt)
        try:
            await asyncio.sleep(60 if prompt == (9,) else 0)
        finally:
            self.ended.append(prompt)
        return [Completion((4,), (-0.5,), 0, "length") for _ in requests]

    def release(self, id: TrajectoryId) -> None: ...


def test_a_client_that_gives_up_does_not_hold_up_the_next_one() -> None:
    engine = Slow()

    async def work(found: Serving) -> None:
        patient, hasty = remote(found), remote(found, request_timeout_s=0.3)
        stuck = asyncio.create_task(patient.generate([ask(0, [9])]))
        while not engine.begun:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineTimeout, match=r"planner: http://\S+ gave no reply within 0.3 s for g5/r1/planner/0"):
            await hasty.generate([ask(1, [8])])  # never reaches the engine
        waits = asyncio.create_task(patient.generate([ask(2, [7])]))
        stuck.cancel()
        assert [c.token_ids for c in await asyncio.wait_for(waits, 5)] == [(4,)]
        assert engine.begun == engine.ended == [(9,), (7,)]

    with_server(engine, work)


def test_local_decoding_ends_when_its_client_is_gone() -> None:
    engine = local()

    async def work(found: Serving) -> None:
        with pytest.raises(EngineTimeout):
            await remote(found, request_timeout_s=0.2).generate([ask(0, [2], max_tokens=100_000, temperature=0.0)])
        completion = await asyncio.wait_for(remote(found).generate([ask(1, [2])]), 10)
        assert completion[0].token_ids

    model = engine._decoder.model
    model.config.max_position_embeddings = 10**6
    with_server(engine, work, limits=Limits(new_tokens=100_000))


# ---------------------------------------------------------------- vLLM's fields, for clients that know no others


def plain(**fields: Any) -> dict[str, Any]:
    shared = {"model": MODEL, "max_tokens": 6, "stop_token_ids": [STOP], "logprobs": 0, "return_token_ids": True}
    return {**shared, "prompt": [2, 3, 4], "seed": 3, **fields}


def complete(*bodies: dict[str, Any], engine: Any = None, limits: Limits | None = None) -> list[dict[str, Any]]:
    async def work(found: Serving) -> list[dict[str, Any]]:
        return [await Client(TOKEN).post(found.url + "/v1/completions", body, 10) for body in bodies]

    return with_server(engine or local(), work, limits=limits)


def test_a_plain_client_reads_vllms_reply() -> None:
    (reply,) = complete(plain())
    (choice,) = reply["choices"]
    assert 1 <= len(choice["token_ids"]) <= 6
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert (choice["index"], choice["text"], choice["prompt_token_ids"]) == (0, "", [2, 3, 4])
    assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == STOP else "length")
    assert (reply["object"], reply["model"]) == ("text_completion", MODEL)
    used, written = reply["usage"], len(choice["token_ids"])
    assert used == {"prompt_tokens": 3, "completion_tokens": written, "total_tokens": 3 + written}
    assert reply["mgrpo"]["version"] == 0


def test_a_plain_clients_seed_makes_its_turn_repeat_and_nothing_is_kept() -> None:
    engine = local()
    same, again, other, several, unseeded = (
        [choice["token_ids"] for choice in reply["choices"]]
        for reply in complete(
            plain(), plain(), plain(seed=4), plain(prompt=[[2, 3, 4], [2, 3, 4]]), plain(seed=None), engine=engine
        )
    )
    assert same == again != other
    assert several[0] == same[0] != several[1]
    assert unseeded[0]
    assert not engine._decoder._kept


def test_top_k_is_off_at_0_and_at_minus_1() -> None:
    off, also_off, greedy = complete(plain(top_k=0), plain(top_k=-1), plain(top_k=1))
    assert off["choices"] == also_off["choices"] != greedy["choices"]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "searcher"}, 404, "the model 'searcher' does not exist; this server has 'planner'"),
    ({"prompt": []}, 400, "0 prompts"),
    ({"prompt": [[2]] * 5}, 400, "5 prompts; one request has from 1 to 4"),
    ({"prompt": [[]]}, 400, "0 prompt tokens"),
    ({"prompt": [2] * 33}, 400, "33 prompt tokens; from 1 to 32 are served"),
    ({"prompt": [2, [3]]}, 400, "not a mixture"),
    ({"prompt": "text"}, 400, "Expected `array`, got `str` - at `$.prompt`"),
    ({"prompt": [-1]}, 400, "Expected `int` >= 0"),
    ({"prompt": [2**40]}, 400, "Expected `int` <= "),
    ({"prompt": [VOCABULARY]}, 400, f"token id {VOCABULARY}; the model has ids below {VOCABULARY}"),
    ({"max_tokens": 17}, 400, "max_tokens = 17; at most 16 are served"),
    ({"max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
    ({"temperature": -1}, 400, "$.temperature"),
    ({"top_p": 1.5}, 400, "$.top_p"),
    ({"top_k": -2}, 400, "$.top_k"),
    ({"n": 2}, 400, "$.n"),
    ({"stream": True}, 400, "stream and echo are not served"),
    ({"logprobs": 5}, 400, "logprobs = 0"),
    ({"return_token_ids": False}, 400, "return_token_ids = true"),
    ({"presence_penalty": 0.5}, 400, "unknown field `presence_penalty`"),
    ({"mgrpo": {"each": []}}, 400, "mgrpo.each has 0 entries for 1 prompts"),
    ({"mgrpo": {"each": [{"id": "g1"}]}}, 400, "not a trajectory id: 'g1'"),
    ({"mgrpo": {"each": [{"id": "g1/r0/a/0", "max_tokens": 17}]}}, 400, "g1/r0/a/0: max_tokens = 17"),
    ({"prompt": [[2], [3]], "mgrpo": {"each": [{"id": "g1/r0/a/0"}] * 2}}, 400, "the same trajectory"),
]


def test_what_is_not_served_is_refused_in_one_line_before_any_work() -> None:
    engine, limits = Slow(), Limits(prompts=4, prompt_tokens=32, new_tokens=16, vocabulary=VOCABULARY)

    async def work(found: Serving) -> None:
        for fields, status, said in BAD:
            with pytest.raises(Refused) as refused:
                await Client(TOKEN).post(found.url + "/v1/completions", plain(**fields), 10)
            assert (refused.value.status, "\n" in str(refused.value)) == (status, False)
            assert said in str(refused.value), fields
        assert not engine.begun

    with_server(engine, work, limits=limits)


def test_the_engines_own_errors_are_the_clients() -> None:
    class Broken(Slow):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise EngineError("out of memory")

    class Short(Slow):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return []

    for engine, said in ((Broken(), "out of memory"), (Short(), "returned 0 completions")):
        with pytest.raises(EngineError, match=rf"HTTP 500: .*{said}.*; asked for g5/r0/planner/0"):
            with_server(engine, lambda found: remote(found).generate([ask(0, [2])]))


def test_health_says_what_is_served_and_503_before_anything_is() -> None:
    async def work(found: Serving) -> None:
        client = Client(TOKEN)
        health = await client.get(found.url + "/health", 5)
        assert health == {"model": MODEL, "version": 0, "instance": found.instance, "state": ""}
        assert (await client.get(found.url + "/v1/models", 5))["data"][0]["id"] == MODEL
        found.version, found.state = -1, "v3: not readable"
        for ask_it in (client.get(found.url + "/health", 5), client.post(found.url + "/v1/completions", plain(), 5)):
            with pytest.raises(Refused, match="HTTP 503: v3: not readable"):
                await ask_it

    with_server(Slow(), work)
