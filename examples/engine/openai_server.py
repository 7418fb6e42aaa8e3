"""An OpenAI-compatible server over the engine: completions and chat, streamed or not; ``usage`` says what was cached.

    pip install . transformers fastapi uvicorn
    python examples/engine/openai_server.py --path /mnt/nvme/kv      serves until it is stopped

Started again with the same path it has not forgotten: ``usage.prompt_tokens_details.cached_tokens`` says so. Tokens are
bytes, and the model's weights are random, so what it says is nonsense, but the same each time. A client that goes away
ends its request. ``cache_salt`` in a request keeps its blocks apart from those of other salts.

An agent says by ``then`` that an answer is a call of a tool, or the last one, and by ``/v1/prefetch`` that a tool is
about to answer.
"""

import argparse
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from paged_llama import BLOCK_SIZE, PagedLlama
from scheduler import Engine, Generation
from tiered_kv import KVLayout, ModelIdentity, ReuseHint, TieredKV, TieredKVSettings

MODEL = "tiny-random-llama"
HINTS = {"tool": ReuseHint(0.9, within_s=30.0, category="tool call"), "over": ReuseHint(0.0)}
"""What comes after an answer, for the cache: the next turn, most likely and soon, or nothing."""


class StreamOptions(BaseModel):
    """What a stream says at its end."""

    include_usage: bool = False


class Wanted(BaseModel):
    """What both kinds of request have; what else clients send is passed over."""

    model: str = MODEL
    max_tokens: Annotated[int, Field(ge=1)] = 32
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str = ""
    then: Literal["", "tool", "over"] = ""


class Completion(Wanted):
    """``POST /v1/completions``."""

    prompt: Annotated[str, Field(min_length=1)]


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(Wanted):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]


def make_app(
    settings: TieredKVSettings | Mapping[str, Any] | None = None,
    *,
    num_blocks: int = 512,
    preempts_by: Literal["swap", "recompute"] = "swap",
) -> FastAPI:
    """Return the application. Its cache is open as long as its lifespan lasts.

    Args:
        settings: Of the cache; from the environment by default.
        num_blocks: Of the engine's own paged cache.
        preempts_by: See `Engine`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        model = PagedLlama(num_blocks)
        layout = KVLayout.from_tensors(model.kv_caches, block_size=BLOCK_SIZE)
        identity = ModelIdentity(MODEL, weights=model.weights)
        async with TieredKV.from_settings(settings, model=identity, layout=layout, device="cpu") as kv:
            kv.register_kv_caches(model.kv_caches)
            app.state.engine = Engine(model, kv, num_blocks, preempts_by=preempts_by)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def complete(wanted: Completion, http: Request) -> Response:
        """Continue a text."""
        return await _answer(http, wanted, wanted.prompt, "text_completion")

    @app.post("/v1/chat/completions")
    async def chat(wanted: Chat, http: Request) -> Response:
        """Answer the last message of a conversation."""
        return await _answer(http, wanted, _turns(wanted) + "<assistant>", "chat.completion")

    @app.post("/v1/prefetch", status_code=204)
    async def prefetch(wanted: Chat, http: Request) -> None:
        """Have a conversation's blocks in memory when its next message comes."""
        await http.app.state.engine.prefetch(list(_turns(wanted).encode()), wanted.cache_salt)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Name the model."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "tiered_kv"}]}

    @app.get("/stats")
    async def stats(http: Request) -> dict[str, Any]:
        """Say what is in each tier, and how the engine does."""
        engine: Engine = http.app.state.engine
        tiers = {tier.tier: {"blocks": tier.ready, "hits": tier.hits} for tier in engine.kv.stats().tiers}
        return {"tiers": tiers, "free_blocks": engine.pages.num_free, "preempted": engine.num_preempted}

    return app


def _turns(wanted: Chat) -> str:
    return "".join(f"<{message.role}>{message.content}\n" for message in wanted.messages)


async def _answer(http: Request, wanted: Wanted, text: str, kind: str) -> Response:
    engine: Engine = http.app.state.engine
    num_shared = text.find("<user>") if isinstance(wanted, Chat) else 0  # the system's message is everybody's
    generation = Generation(list(text.encode()), wanted.cache_salt, HINTS.get(wanted.then), max(0, num_shared))
    try:
        tokens = engine.generate(generation, wanted.max_tokens)
    except ValueError as error:
        problem = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": problem}, status_code=400)
    if wanted.stream:
        return StreamingResponse(_events(tokens, generation, wanted, kind), media_type="text/event-stream")
    said: list[int] = []
    async with aclosing(tokens):
        async for token in tokens:
            said.append(token)
            if await http.is_disconnected():
                break
    return JSONResponse(
        _head(wanted, kind) | {"choices": [_choice(kind, _text(said), "length")], "usage": _usage(generation)}
    )


async def _events(
    tokens: AsyncGenerator[int], generation: Generation, wanted: Wanted, kind: str
) -> AsyncGenerator[str]:
    """Give each token as it comes. Whoever stops listening closes this, which ends the generation."""
    kind += ".chunk" * (kind == "chat.completion")
    head = _head(wanted, kind)
    async with aclosing(tokens):
        async for token in tokens:
            yield _event(head | {"choices": [_choice(kind, _text([token]), None)]})
    yield _event(head | {"choices": [_choice(kind, "", "length")]})
    if wanted.stream_options.include_usage:
        yield _event(head | {"choices": [], "usage": _usage(generation)})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _head(wanted: Wanted, kind: str) -> dict[str, Any]:
    return {"id": f"gen-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": wanted.model}


def _choice(kind: str, text: str, finish_reason: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    if kind == "text_completion":
        return choice | {"text": text}
    return choice | {"delta" if kind.endswith("chunk") else "message": {"role": "assistant", "content": text}}


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, said = len(generation.prompt), len(generation.tokens) - len(generation.prompt)
    cached = {"cached_tokens": generation.num_cached}
    return {
        "prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said,
        "prompt_tokens_details": cached,
    }  # fmt: skip


def _text(tokens: Sequence[int]) -> str:
    """Spell tokens: one character each, whatever bytes they are."""
    return "".join(map(chr, tokens))


def main() -> None:
    """Serve, on this machine alone."""
    parser = argparse.ArgumentParser(description="Serve a tiny model with tiered_kv below it.")
    parser.add_argument("--path", help="a directory for the NVMe tier; without one, the tiers of the environment")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--preempts-by", choices=["swap", "recompute"], default="swap")
    arguments = parser.parse_args()
    nvme = {"medium": "nvme", "path": arguments.path, "capacity": "4GiB"}
    settings = {"tiers": [{"medium": "cpu", "capacity": "256MiB"}, nvme]} if arguments.path else None
    uvicorn.run(make_app(settings, preempts_by=arguments.preempts_by), host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
