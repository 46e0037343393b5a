"""Thirty-two clients at once get the tokens that one gets alone, whatever the server is told.

In float64, where every path computes softmax(QKᵀ)V over the same pairs up to rounding far below
any gap between two tokens.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server_process import Server

NUM_CLIENTS = 32
SYSTEM = "The keeper of the light writes down every ship. " * 4
VARIANTS = [
    (*caching, *chunks, *backend)
    for caching, chunks, backend in itertools.product(
        (["--enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (
            ["--prefill-chunk-size", "16", "--max-num-batched-tokens", "64"],
            ["--prefill-chunk-size", "128", "--max-num-batched-tokens", "512"],
        ),
        (["--attention-backend", "reference"], ["--attention-backend", "auto"]),
    )
]


def ask(server: Server, client: int) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of one client's chat, as bytes, and their log probabilities; its prompt is
    220 to 650 tokens long."""
    question = f"{client}: " + "which ship? " * (client % 33)
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
        "logprobs": True,
    }
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()["choices"][0]["logprobs"]["content"]
    return [token["bytes"] for token in found], [token["logprob"] for token in found]


@pytest.mark.slow
def test_eight_variants_give_the_tokens_of_one_client_alone(tiny_model: Path) -> None:
    expected: list[tuple[list[list[int]], list[float]]] = []
    for variant in VARIANTS:
        options = ("--dtype", "float64", "--num-gpu-blocks-override", "512", *variant)
        server = Server(tiny_model, *options).wait_ready()
        expected = expected or [ask(server, client) for client in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            found = list(pool.map(lambda c, s=server: ask(s, c), range(NUM_CLIENTS)))
        assert server.stop() == 0
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], variant
        for (_, scores), (_, wanted) in zip(found, expected, strict=True):
            assert scores == pytest.approx(wanted, abs=1e-10), variant
    # Or there would be nothing to confuse.
    assert len({scores[0] for _, scores in expected}) == NUM_CLIENTS
