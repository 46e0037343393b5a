"""The default model's own vocabulary, where its file is on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stairs.checkpoints.gguf import open_gguf
from stairs.checkpoints.sources import ALIASES, find_local
from stairs.text.tokenizer import Tokenizer

PATH = find_local(ALIASES["smollm2"])
pytestmark = pytest.mark.skipif(PATH is None, reason="the default model is not here: stairs pull")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert PATH is not None
    return Tokenizer.from_gguf(open_gguf(PATH).metadata)


def test_ids_are_transformers_own_once_its_split_is_the_published_one(
    tokenizer: Tokenizer, page: list[str]
):
    """transformers reads this file's ``pre`` as GPT-2's; SmolLM2 was published with every digit
    split off first. That differs only where two or more white characters precede a digit."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    assert isinstance(PATH, Path)
    theirs = transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)
    as_read = [theirs.encode(text, add_special_tokens=False) for text in page]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    for text in page:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), text
    differ = [
        text for text, ids in zip(page, as_read, strict=True) if tokenizer.encode(text) != ids
    ]
    assert len(differ) <= 3 and "x  123\n\n 12\t\t4" in differ


def test_the_vocabulary_itself_says_that_digits_stand_alone(tokenizer: Tokenizer):
    """No merge ever joined a digit to anything, which GPT-2's split would have allowed."""
    tokens = [tokenizer.token_bytes(i) for i in range(17, tokenizer.vocab_size)]
    assert all(len(token) == 1 for token in tokens if any(48 <= byte <= 57 for byte in token))


def test_a_chat_as_the_models_template_has_it(tokenizer: Tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.bos_token_id is None and ids.count(1) == 3
