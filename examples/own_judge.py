"""A judge of your own behind HTTP: an async function, so that a process asks about many responses at the same time.

    task.rewards=[{name: "examples.own_judge:judged", timeout: 60.0, retries: 3, environment: [JUDGE_URL]}]

The function needs no time limit and no retries of its own: an exception, such as that of status 503, or a call of more
than 60 seconds is repeated 3 times, after 1, 2 and 4 seconds, and is counted then. docs/rewards.md says more.
"""

import asyncio
import json
import os
from urllib.request import Request, urlopen

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:9000/rate")


async def judged(*, problem: str, response: str, answer: str, finished: bool) -> float:
    """Return the number that the server gives to a response."""
    question = json.dumps({"problem": problem, "response": response, "reference": answer}).encode()
    return await asyncio.to_thread(_ask, Request(URL, question, {"Content-Type": "application/json"}))


def _ask(request: Request) -> float:
    """Send one request and wait for its answer; a client such as httpx or aiohttp needs no thread for it."""
    with urlopen(request, timeout=60.0) as reply:
        return json.load(reply)["score"]
