"""Clients of the endpoint that leave at random moments: do slots or memory leak, are later answers unharmed?

    python -m benchmarks.endpoint.leaving_clients

Half of the clients stream; they ask for one to three texts each and leave after a random time, before their answer is
complete. Then every slot must be free, answers must be what they were, and memory after the last round what it was
after the first. Exits with 1 where one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from collections.abc import Sequence

import httpx2
import psutil

from benchmarks.endpoint.servers import Server, endpoint

_CLIENTS_AT_ONCE = 50
_GROWTH = 1.1
"""Memory may grow so much from the end of the first round to the end of the last one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the clients and say what was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500, help="in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng = random.Random(args.seed)
    with endpoint(None, "auto", ["--engine.max_num_seqs", "8", "--engine.num_draft_tokens", "16"]) as server:
        before = answer(server)
        memory = []
        for turn in range(args.rounds):
            completed = asyncio.run(crowd(server, args.clients, rng))
            taken = wait_until_idle(server)
            memory.append(resident_bytes(server.pid))
            print(
                f"round {turn + 1}: {args.clients} clients, {completed} of them answered before they left, "
                f"{taken:.0f} slots still taken, {memory[-1] / 2**20:.0f} MiB resident"
            )
            if taken:
                raise SystemExit("error: slots leak")
        if answer(server) != before:
            raise SystemExit("error: an answer has changed")
        if memory[-1] > _GROWTH * memory[0]:
            raise SystemExit("error: memory grows")
    print("all slots are free, answers are what they were, memory is flat")


async def crowd(server: Server, clients: int, rng: random.Random) -> int:
    """All clients of a round; how many had their answer before they left."""
    gate = asyncio.Semaphore(_CLIENTS_AT_ONCE)
    moments = [rng.expovariate(4.0) for _ in range(clients)]
    async with httpx2.AsyncClient(base_url=server.address, timeout=600) as client:

        async def visit(place: int) -> bool:
            body = question(server) | {"stream": place % 2 == 0, "n": 1 + place % 3, "max_tokens": 400}
            async with gate:
                try:
                    async with (
                        asyncio.timeout(moments[place]),
                        client.stream("POST", "/v1/chat/completions", json=body) as response,
                    ):
                        async for _ in response.aiter_bytes():
                            pass
                except TimeoutError:
                    return False
                return True

        return sum(await asyncio.gather(*(visit(place) for place in range(clients))))


def question(server: Server) -> dict[str, object]:
    """What is asked."""
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "Tom has 3 boxes of 12 pens. How many pens has he?"}],
    }


def answer(server: Server) -> str:
    """The greedy answer."""
    body = question(server) | {"temperature": 0}
    response = httpx2.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
    text: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def wait_until_idle(server: Server, seconds: float = 10.0) -> float:
    """Slots taken and requests waiting, as soon as there are none, or when time is up."""
    deadline = time.monotonic() + seconds
    while True:
        page = httpx2.get(f"{server.address}/metrics", timeout=30).text
        taken = sum(map(float, re.findall(r"^drafter_(?:slots_active|requests_waiting)\{.*\} (\S+)$", page, re.M)))
        if not taken or time.monotonic() > deadline:
            return taken
        time.sleep(0.1)


def resident_bytes(pid: int) -> int:
    """Memory of the server's process and all its children that is its own."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


if __name__ == "__main__":
    main()
