# ruff: noqa: RUF001 - the page is meant to hold characters that look like others
"""A small byte-level vocabulary, trained in a moment, as a GGUF's metadata would hold it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

# Mixed scripts, emoji, code, digits and whitespace of every kind.
PAGE = [
    "Hello, world! It's 7:05 pm; we've got $3.50 and 1,234,567 tokens.",
    "def f(x):\n\treturn {k: v[::2] for k, v in x}  # 20 + 22 == 42\n\n\n    if x >= 10:\r\n",
    "안녕하세요, 토큰 12개를 만듭니다. 세계!",
    "Привет, мир — «ёлка» № 5",
    "你好，世界。第3章 模型",
    "こんにちは、ﾊﾛｰ１２３",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया שלום 9",
    "😀👩‍👩‍👧‍👦🇰🇷 e\u0301 é ﬁ ½ ² Ⅷ",
    "  two  spaces   three\t\ttabs \u00a0nbsp\u3000wide \n \n  \n",
    "x  123\n\n 12\t\t4",
    "don't DON'T we'LL I'M o'clock's CamelCaseHTTPServer snake_case",
    "\u200b\ufeffzero width https://example.org/a?b=c&d=%20#e",
    "",
]  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def page() -> list[str]:
    return PAGE


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(PAGE * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens.append("<think>")
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    kinds[-1] = 4
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHATML,
    }
