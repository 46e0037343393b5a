"""The idea's numbers (each written out by hand) and the laws the formulas keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stairs.accounting import costs
from stairs.config import ModelConfig

MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize("chunk", [128, 512, 2048, 8192])
def test_an_8192_token_prompt_has_the_same_pairs_however_it_is_chunked(chunk: int) -> None:
    steps = costs.prefill_steps(8192, chunk=chunk)
    assert sum(costs.causal_pairs(*step) for step in steps) == 33_558_528


def test_only_the_largest_step_shrinks_with_chunks() -> None:
    assert costs.square_pairs(8192, 8192) == 67_108_864
    assert costs.largest_step([(8192, 8192)]) == 67_108_864
    assert costs.largest_step(costs.prefill_steps(8192, chunk=512)) == 4_194_304


def test_chunked_steps_run_from_131328_to_4063488_pairs() -> None:
    pairs = [costs.causal_pairs(*step) for step in costs.prefill_steps(8192, chunk=512)]
    assert (pairs[0], pairs[-1], len(pairs)) == (131_328, 4_063_488, 16)


def test_four_chunks_of_128_make_a_step_of_512() -> None:
    four = costs.prefill_steps(8192, chunk=128, chunks_per_step=4)
    assert four == costs.prefill_steps(8192, chunk=512)


def test_twelve_tokens_in_chunks_of_four_leave_4_8_12_and_78_pairs() -> None:
    steps = costs.prefill_steps(12, chunk=4)
    assert [context for _, context in steps] == [4, 8, 12]
    assert sum(costs.causal_pairs(*step) for step in steps) == 78
    assert costs.causal_pairs(12, 12) == 78


def test_a_pinned_prefix_leaves_the_users_rows_and_their_pairs() -> None:
    system, user = 6000, 2192
    steps = costs.prefill_steps(system + user, chunk=512, cached=system)
    assert sum(new for new, _ in steps) == user
    assert steps[0] == (144, 6144)  # the first chunk is short: it ends at a multiple of 512
    assert sum(costs.causal_pairs(*step) for step in steps) == 15_555_528
    assert user * system + user * (user + 1) // 2 == 15_555_528


def test_a_prefix_of_6000_leaves_27_percent_of_rows_but_46_percent_of_pairs() -> None:
    hit = costs.prefix_hit(6000, 8192, block_size=16)
    assert hit == 6000
    assert round((8192 - hit) / 8192, 3) == 0.268
    assert round(costs.causal_pairs(8192 - hit, 8192) / 33_558_528, 3) == 0.464


def test_a_fully_cached_prompt_recomputes_at_least_one_token() -> None:
    assert costs.prefix_hit(32, 32, block_size=16) == 16
    assert costs.prefix_hit(33, 33, block_size=16) == 32
    assert costs.prefix_hit(15, 100, block_size=16) == 0


def test_a_200_token_answer_is_one_prefill_and_199_one_row_steps() -> None:
    steps = costs.decode_steps(50, 200)
    assert len(steps) == 199
    assert {new for new, _ in steps} == {1}
    assert (steps[0], steps[-1]) == ((1, 51), (1, 249))


def test_gpt2_at_1024_full_square_and_one_cached_token(gpt2: ModelConfig) -> None:
    qk = costs.attention_macs(gpt2, 1024, 1024, convention="square")["qk"]
    assert qk == 9_663_676_416
    assert qk // 12 == 805_306_368
    cached = costs.attention_macs(gpt2, 1, 1024)["qk"]
    assert cached == 9_437_184
    assert qk == 1024 * cached


def test_gpt2_linear_layers_save_nine_times_the_qk_term(gpt2: ModelConfig) -> None:
    per_token = sum(costs.linear_macs(gpt2).values())
    assert per_token == 84_934_656
    saved = 1023 * per_token
    qk_saved = 9_663_676_416 - 9_437_184
    assert round(saved / qk_saved) == 9


def test_gpt2_forward_is_the_published_291_gflop(gpt2: ModelConfig) -> None:
    # 1 x 1024 tokens, full square, a row of logits for every token.
    macs = costs.step_macs(gpt2, [(1024, 1024)], logits_rows=1024, convention="square")
    assert costs.flops(macs) == 291_648_307_200


def test_gpt2_kv_is_36_mib_a_sequence_and_users_and_context_multiply_it(gpt2: ModelConfig) -> None:
    assert 1024 * 12 * costs.kv_values_per_token(gpt2) == 18_874_368
    one = costs.kv_sequence_bytes(gpt2, 1024, 2)
    assert one == 36 * MIB
    assert costs.kv_pool_bytes(gpt2, [1024] * 100, 2, block_size=16) == 3600 * MIB
    assert costs.kv_pool_bytes(gpt2, [1024] * 1000, 2, block_size=16) == 36_000 * MIB
    assert costs.kv_sequence_bytes(gpt2, 10_240, 2) == 10 * one


def test_llama_kv_is_128_kib_a_token_and_4_gib_at_32k(llama_8b: ModelConfig) -> None:
    assert costs.kv_bytes_per_token(llama_8b, 2) == 128 * 1024
    assert costs.kv_sequence_bytes(llama_8b, 32_768, 2) == 4 * GIB


def test_one_32k_bf16_score_matrix_is_2_gib() -> None:
    assert costs.score_bytes(32_768, 32_768, 2) == 2 * GIB


def test_paging_wastes_less_than_one_block(llama_8b: ModelConfig) -> None:
    assert costs.blocks_for(33, 16) == 3
    assert costs.kv_waste_bytes(llama_8b, 33, 2, block_size=16) == 15 * 128 * 1024
    assert costs.kv_waste_bytes(llama_8b, 48, 2, block_size=16) == 0


def test_llama_8b_prefill_and_decode_flops(llama_8b: ModelConfig) -> None:
    prefill = costs.step_macs(llama_8b, [(8192, 8192)], logits_rows=1)
    attention = 2 * (prefill["qk"] + prefill["pv"])
    assert round(attention / 1e12, 1) == 17.6
    linear = costs.flops(prefill) - attention - 2 * prefill["head"]
    assert round(linear / 1e12, 1) == 114.3
    square = costs.attention_macs(llama_8b, 8192, 8192, convention="square")
    assert round(costs.flops(square) / 1e12, 1) == 35.2
    decode = costs.step_macs(llama_8b, [(1, 8192)], logits_rows=1)
    assert round(costs.flops(decode) / 1e9, 1) == 19.3


@given(st.integers(1, 300), st.integers(0, 299), st.integers(1, 40), st.integers(1, 5))
def test_chunks_partition_the_rest_of_the_prompt(
    prompt: int, cached: int, chunk: int, per_step: int
) -> None:
    cached %= prompt
    steps = costs.prefill_steps(prompt, chunk=chunk, cached=cached, chunks_per_step=per_step)
    ends = [context for _, context in steps]
    assert [new for new, _ in steps] == [b - a for a, b in zip([cached, *ends], ends, strict=False)]
    assert all(end % chunk == 0 for end in ends[:-1])
    assert ends[-1] == prompt
    pairs = sum(costs.causal_pairs(*step) for step in steps)
    assert pairs == costs.causal_pairs(prompt - cached, prompt)


@given(st.integers(1, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_pairs_are_what_counting_the_mask_gives(new: int, before: int, window: int | None) -> None:
    context = before + new
    seen = sum(
        1
        for i in range(before, context)
        for j in range(context)
        if j <= i and (window is None or j > i - window)
    )
    assert costs.causal_pairs(new, context, window) == seen


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="new 5"):
        costs.causal_pairs(5, 4)
    with pytest.raises(ValueError, match="cached 4"):
        costs.prefill_steps(4, chunk=2, cached=4)
    with pytest.raises(ValueError, match="chunk 0"):
        costs.prefill_steps(4, chunk=0)
