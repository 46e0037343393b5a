"""Options and parameters are checked when they are built; the message names the field."""

from __future__ import annotations

import math

import pytest

from stairs.config import CacheConfig, ModelConfig, SamplingParams
from stairs.errors import ConfigError, InvalidRequestError, StairsError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-30),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: 101}),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ("a", "")),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_sampling_params_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and caught.value.status == 400


def test_a_single_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("block_size", 0, "block_size"),
        ("dtype", "fp4", "kv_cache_dtype"),
        ("num_blocks", 0, "num_blocks"),
        ("memory_bytes", -1, "memory_bytes"),
        ("pin_memory_fraction", 1.5, "pin_memory_fraction"),
    ],
)
def test_cache_config_names_the_option(field: str, value: object, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**{field: value})
    assert caught.value.param == param


def test_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="num_heads 9 is not a multiple of num_kv_heads 2"):
        ModelConfig(
            model_type="llama", vocab_size=8, hidden_size=8, num_layers=1, num_heads=9,
            num_kv_heads=2, head_dim=2, intermediate_size=8, max_position_embeddings=8,
            norm_eps=1e-5, activation="silu",
        )  # fmt: skip


def test_every_error_has_a_status_and_a_code() -> None:
    def tree(error: type[StairsError]) -> list[type[StairsError]]:
        return [error, *(e for child in error.__subclasses__() for e in tree(child))]

    for error in tree(StairsError):
        assert 400 <= error.status <= 503 and error.code
        assert error("why", param="field").param == "field"
