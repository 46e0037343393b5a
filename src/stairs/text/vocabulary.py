"""A ``tokenizers`` backend from a GGUF's ``tokenizer.ggml`` metadata, which has no tokenizer.json.

Two models: ``gpt2`` is byte-level BPE, whose split of the text before merging is one row of
``_SPLITS`` by ``tokenizer.ggml.pre``; ``llama`` is SentencePiece's BPE, whose merges follow from
the scores. A split that is not in the table would give other ids, so it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stairs.errors import CheckpointError

__all__ = ["backend_from_gguf"]

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt2", "digits then gpt2"  # splits that the library has built in

_SPLITS: Mapping[str, str] = {
    "gpt-2": _GPT2, "olmo": _GPT2, "mpt": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}  # fmt: skip
# Vocabularies in which a whole word that is a token stays one even where no merge builds it.
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})  # their tokenizer.json composes characters first


def backend_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF describes, special tokens included; no BOS is added by it."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("the file has no tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens holds a token twice")
    if kind == "gpt2":
        backend = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(metadata, vocabulary)
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model {kind!r:.80} is not supported; one of gpt2, llama"
        )
    _add_tokens(backend, metadata, tokens)
    return backend


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None and metadata.get("general.architecture") == "gpt2":
        name = "gpt-2"  # files from before the key
    if not isinstance(name, str) or name not in _SPLITS:
        raise CheckpointError(
            f"tokenizer.ggml.pre {name!r:.80} is not a known way to split text; "
            "convert the model again or use its Hugging Face folder"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError("the file has no tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise CheckpointError("tokenizer.ggml.merges holds an entry that is not two tokens")
    backend = _bpe(vocabulary, pairs, ignore_merges=name in _IGNORE_MERGES)
    split = _SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS)
    )
    if split == _GPT2:
        backend.pre_tokenizer = byte_level
    elif split == _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
        )
    if name in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or isinstance(scores, str) or len(scores) != len(vocabulary):
        raise CheckpointError("tokenizer.ggml.scores must hold a score for each token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(vocabulary):
        raise CheckpointError(f"tokenizer.ggml.unknown_token_id {unknown!r:.80} is not a token")
    backend = _bpe(
        vocabulary,
        _merges_by_score(vocabulary, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=list(vocabulary)[unknown],
    )
    spaces = normalizers.Replace(" ", "▁")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    strip = [decoders.Strip(content=" ", left=1)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: merges are all splits of a token
    into two tokens, ordered by the score of the whole."""
    merges: list[tuple[float, int, str, str]] = []
    for token, index in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def _bpe(vocabulary: dict[str, int], merges: Sequence[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"the tokenizer's merges do not fit its tokens: {error}") from None


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Control tokens stay whole and are special; user-defined ones stay whole."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    if isinstance(kinds, str | int | float) or (kinds and len(kinds) != len(tokens)):
        raise CheckpointError("tokenizer.ggml.token_type must hold a type for each token")
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _UNKNOWN) and token:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED and token:
            plain.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
