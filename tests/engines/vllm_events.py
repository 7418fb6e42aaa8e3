"""What a router hears of a real vLLM with us below it: ``vllm_events.py JSON``.

Runs in vLLM's environment, with vLLM's own publisher and decoder; the JSON is that of `vllm_generate`. After each round
the engine's own prefix cache is emptied and the tiers are settled; the answer has, of what the router knows in the end,
how many blocks are where, and of all that it heard whether tiers were said to have what the GPU had computed.
"""

import json
import os
import socket
import sys
from typing import Any

import msgspec
import zmq

from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments, prompt, settle


class Router:
    """An index of blocks by medium, kept as events come."""

    def __init__(self, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415 - takes seconds

        self.index: dict[str, set[int]] = {}
        self.removed: dict[str, int] = {}
        self.computed: dict[int, Any] = {}
        self.others: dict[int, Any] = {}
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")

    def listen(self) -> None:
        """Take what has come, until nothing does for a while."""
        while self._socket.poll(1000):
            _, _, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                self._apply(event)

    def _apply(self, event: Any) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored  # noqa: PLC0415 - takes seconds

        match event:
            case BlockStored():
                self.index.setdefault(event.medium, set()).update(event.block_hashes)
                parents = [event.parent_block_hash, *event.block_hashes[:-1]]
                size = event.block_size
                for number, own in enumerate(event.block_hashes):
                    tokens = event.token_ids[number * size : (number + 1) * size]
                    (self.computed if event.medium == "GPU" else self.others)[own] = (parents[number], tokens)
            case BlockRemoved():
                self.index.setdefault(event.medium, set()).difference_update(event.block_hashes)
                self.removed[event.medium] = self.removed.get(event.medium, 0) + len(event.block_hashes)
            case _:  # AllBlocksCleared: vLLM has emptied its prefix cache, and some routers think that all has ended
                self.index.clear()


def main(wanted: Wanted) -> None:
    """Run all rounds, listen, and print the answer."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.config import KVEventsConfig  # noqa: PLC0415 - takes seconds

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}")
    llm = LLM(**engine_arguments(wanted), kv_events_config=config)
    router = Router(f"tcp://127.0.0.1:{port}")
    router.listen()
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0.0, max_tokens=wanted.num_tokens, ignore_eos=True, detokenize=False)
    for _ in range(wanted.rounds):
        for number in wanted.prompts:
            tokens = {"prompt_token_ids": prompt(number, wanted.length)}
            llm.generate([tokens], sampling, use_tqdm=False)
            scheduler.connector._in_scheduler().kv.flush()  # noqa: SLF001 - its tiers are settled
        llm.generate([{"prompt_token_ids": prompt(99, 8)}], sampling, use_tqdm=False)  # steps, which publish
        router.listen()
        settle(llm)
        llm.reset_prefix_cache()
    known = {medium: len(hashes) for medium, hashes in router.index.items()}
    is_told_right = all(router.computed[own] == what for own, what in router.others.items())
    print(json.dumps({"known": known, "removed": router.removed, "is_told_right": is_told_right}))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    main(Wanted(**json.loads(sys.argv[1])))
