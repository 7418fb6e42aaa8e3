"""The reference engine, asked by the real client: it says the same with a cache, after a restart, and preempted.

Of what is compared, the logits of the likeliest and the second token differ by 0.008 or more: rounding changes none.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import pytest
import uvicorn
from anyio.lowlevel import checkpoint
from openai import AsyncOpenAI, BadRequestError

from openai_server import MODEL, make_app
from paged_llama import BLOCK_SIZE
from scheduler import Engine, Generation
from tiered_kv import BlockState, hash_blocks

SYSTEM = "You are a paged engine. " * 20  # 30 full blocks, shared by all
QUESTIONS = [f"Question {number}: {'why ' * (number + 1)}?" for number in range(6)]


class Served:
    """A server that is up, and a client of it."""

    def __init__(self, client: AsyncOpenAI, engine: Engine) -> None:
        self.client = client
        self.engine = engine

    async def ask(self, question: str, max_tokens: int = 24, salt: str = "", then: str = "") -> tuple[str, int]:
        """Stream an answer; return it, and how many tokens of the prompt were cached."""
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        stream = await self.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=max_tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"cache_salt": salt, "then": then},
        )  # fmt: skip
        said, cached = [], -1
        async for chunk in stream:
            said += [choice.delta.content or "" for choice in chunk.choices]
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return "".join(said), cached

    async def ask_all(self, questions: Sequence[str] = QUESTIONS, max_tokens: int = 24) -> list[tuple[str, int]]:
        """Ask them at once."""
        return await asyncio.gather(*(self.ask(question, max_tokens) for question in questions))


@asynccontextmanager
async def served(
    *tiers: dict[str, Any], num_blocks: int = 512, preempts_by: Literal["swap", "recompute"] = "swap"
) -> AsyncGenerator[Served]:
    """Serve on a free port, with these tiers, for the length of the block; nothing may be left of any request."""
    app = make_app({"tiers": tiers}, num_blocks=num_blocks, preempts_by=preempts_by)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await checkpoint()
        assert not serving.done()
    (port,) = {socket.getsockname()[1] for each in server.servers for socket in each.sockets}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        try:
            yield Served(client, app.state.engine)
            await everything_is_free(app.state.engine)
        finally:
            server.should_exit = True
            await serving


async def everything_is_free(engine: Engine) -> None:
    """Wait until no request holds a block."""
    async with asyncio.timeout(30):
        while engine.pages.num_free < engine.pages.num_blocks:
            await checkpoint()


CPU = {"medium": "cpu", "capacity": "16MiB"}
NOTHING = {"medium": "cpu", "capacity": 0}, {"medium": "memory", "capacity": "1MiB", "read_only": True}


@pytest.fixture(scope="module")
def uncached() -> list[str]:
    """What is answered without a cache, one request at a time."""

    async def ask_each() -> list[str]:
        async with served(*NOTHING) as server:
            return [(await server.ask(question))[0] for question in QUESTIONS]

    return asyncio.run(ask_each())


async def test_streams_side_by_side_and_a_restart(uncached: list[str], tmp_path: Path) -> None:
    """Concurrent streams say what each says alone without a cache; a new server starts with what the last one knew."""
    nvme = {"medium": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    async with served(CPU, nvme) as server:
        first = await server.ask(QUESTIONS[0])
        assert first == (uncached[0], 0)
        answers = await server.ask_all()
        assert [said for said, _ in answers] == uncached
        assert all(cached >= 480 for _, cached in answers)  # the system prompt, at least
        assert (await server.ask(QUESTIONS[0], salt="another tenant"))[1] == 0
        await server.engine.kv.flush()
    async with served(CPU, nvme) as server:
        again = await server.ask_all()
        assert [said for said, _ in again] == uncached
        assert all(cached >= 480 for _, cached in again)
        assert server.engine.kv.stats()["nvme"].hits > 0


@pytest.mark.parametrize("preempts_by", ["swap", "recompute"])
async def test_too_few_blocks_preempt(uncached: list[str], preempts_by: Literal["swap", "recompute"]) -> None:
    """Younger requests make room for older ones and go on later, with the same words."""
    async with served(CPU, num_blocks=72, preempts_by=preempts_by) as server:  # for less than two whole ones
        answers = await server.ask_all(QUESTIONS[:3], max_tokens=64)
        assert [said[:24] for said, _ in answers] == uncached[:3]
        assert server.engine.num_preempted > 0
        assert server.engine.kv.stats()["cpu"].leased == 0


async def test_a_client_that_goes_away_ends_its_request() -> None:
    """Streamed or not; its blocks are free again while the server goes on."""
    async with served(CPU) as server:
        stream = await server.client.completions.create(model=MODEL, prompt="Go on. " * 9, max_tokens=5000, stream=True)
        async for _ in stream:
            break
        assert server.engine.pages.num_free < server.engine.pages.num_blocks
        await stream.close()
        await everything_is_free(server.engine)
        asking = asyncio.create_task(
            server.client.completions.create(model=MODEL, prompt="Go on. " * 9, max_tokens=5000)
        )
        while server.engine.pages.num_free == server.engine.pages.num_blocks:
            await checkpoint()
        asking.cancel()
        await asyncio.wait({asking})
        await everything_is_free(server.engine)
        answer = await server.client.completions.create(model=MODEL, prompt="Still there?", max_tokens=5)
        assert len(answer.choices[0].text) == 5


def test_a_program_that_ends_meanwhile_is_not_held_up() -> None:
    """Its event loop cancels everything at once: requests end when the step that uses their blocks has ended."""

    async def leave_in_the_middle() -> Engine:
        app = make_app({"tiers": (CPU,)})
        lifespan = app.router.lifespan_context(app)
        await lifespan.__aenter__()
        engine: Engine = app.state.engine
        asking = asyncio.create_task(anext(engine.generate(Generation([1] * 900), 1000)))
        while engine.pages.num_free == engine.pages.num_blocks:
            await checkpoint()
        await asyncio.wait({asking})
        return engine

    engine = asyncio.run(leave_in_the_middle())
    assert engine.pages.num_free == engine.pages.num_blocks


async def test_what_can_never_fit_is_refused() -> None:
    """At once, and in words."""
    async with served(CPU, num_blocks=8) as server:
        with pytest.raises(BadRequestError, match="128 in all"):
            await server.client.completions.create(model=MODEL, prompt="x" * 100, max_tokens=100)
        assert [model.id async for model in await server.client.models.list()] == [MODEL]


@pytest.mark.slow
async def test_64_streams_at_once() -> None:
    """More than there are blocks for: all are served, a second round from the cache, with the same words."""
    questions = [f"Question {number}?" for number in range(64)]
    async with served(CPU) as server:
        first = await server.ask_all(questions, max_tokens=8)
        second = await server.ask_all(questions, max_tokens=8)
        assert [said for said, _ in second] == [said for said, _ in first]
        assert all(len(said) == 8 for said, _ in first)
        assert all(cached >= 512 for _, cached in second)


def found(server: Served, question: str) -> int:
    """Count the blocks of a question's own that are in memory, behind those of the system's message."""
    text = f"<system>{SYSTEM}\n<user>{question}\n<assistant>".encode()
    keys = hash_blocks(list(text), block_size=BLOCK_SIZE)[31:]
    return int((server.engine.kv.membership(keys, tier="cpu") == BlockState.HIT).sum())


async def test_an_agent_says_what_comes_behind_an_answer(tmp_path: Path) -> None:
    """A conversation that is over goes first, what all share stays, and what a tool has answered for is in memory."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": "64MiB"}
    async with served({"medium": "cpu", "capacity": "1MiB", "policy": "lru"}, disk) as server:
        num_slots = server.engine.kv.stats()["cpu"].num_slots
        called, over = "called " * 20, "over " * 28
        await server.ask(called, then="tool")
        await server.ask(over, then="over")
        await server.engine.kv.flush()
        assert (found(server, called), found(server, over)) == (9, 9)
        number = 0
        while found(server, over) == 9:
            number += 1
            assert number < num_slots
            await server.ask(f"{number} others " * 12)
            await server.engine.kv.flush()
        assert found(server, called) == 9
        while found(server, called):
            number += 1
            await server.ask(f"{number} others " * 12)
            await server.engine.kv.flush()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": called}]
        await server.client.post("/prefetch", body={"messages": messages}, cast_to=NoneType)
        assert found(server, called) == 8, "the ninth block ends in what the engine writes before an answer"
        assert (await server.ask(over))[1] >= len(SYSTEM) // BLOCK_SIZE * BLOCK_SIZE
