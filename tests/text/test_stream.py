"""Deltas: whole characters, no stop string leaked, together exactly the text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stairs.text.stream import TextStream


class Pieces:
    """A tokenizer whose token i is the i-th piece; negative ids are special."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if token_id >= 0 else b"<eos>"

    def is_special(self, token_id: int) -> bool:
        return token_id < 0


def run(pieces: Sequence[bytes], **options) -> tuple[list[str], TextStream]:
    """Deltas of the pieces and of the end."""
    stream = TextStream(Pieces(pieces), **options)
    deltas = [stream.push(index) for index in range(len(pieces))]
    return [*deltas, stream.finish()], stream


def test_an_emoji_over_four_tokens_is_one_delta():
    emoji = "😀".encode()
    deltas, _ = run([b"a", *(emoji[i : i + 1] for i in range(4)), b"b"])
    assert deltas == ["a", "", "", "", "😀", "b", ""]


def test_a_budget_that_ends_inside_a_character_loses_nothing_silently():
    deltas, _ = run([b"a", "😀".encode()[:2]])
    assert deltas == ["a", "", "\ufffd"]
    deltas, _ = run([b"\xe9\x8f", b"x"])  # cut off by what follows
    assert "".join(deltas) == "\ufffdx"


def test_a_stop_string_across_tokens():
    deltas, stream = run([b"alpha ", b"beta", b" ", b"gam", b"ma", b" delta"], stop=["beta gamma"])
    assert "".join(deltas) == "alpha " and deltas[0] == "alpha "
    assert stream.stop_reason == "beta gamma" and stream.num_tokens == 5


def test_the_stop_string_can_be_kept():
    deltas, stream = run(
        [b"say ", b"ST", b"OP now"], stop=["STOP"], include_stop_str_in_output=True
    )
    assert "".join(deltas) == "say STOP" and stream.num_tokens == 3


def test_a_false_start_is_let_go():
    deltas, stream = run([b"a\n", b"\nb", b"\n\n", b"User"], stop=["\n\nUser:"])
    assert deltas == ["a", "\n\nb", "", "", "\n\nUser"]
    assert stream.stop_reason is None and stream.num_tokens == 4


def test_nothing_is_held_that_starts_no_stop_string():
    deltas, _ = run([b"plain ", b"text"], stop=["\n\nUser:"])
    assert deltas == ["plain ", "text", ""]


def test_the_first_complete_string_stops_and_of_two_the_longer():
    _, stream = run([b"xaby"], stop=["by", "ab"])
    assert stream.stop_reason == "ab"
    deltas, stream = run([b"xab"], stop=["b", "ab"])
    assert stream.stop_reason == "ab" and "".join(deltas) == "x"


def test_min_tokens():
    pieces = [b"a STOP", b" b", b" c STOP"]
    for min_tokens, text, num in ((0, "a ", 1), (1, "a ", 1), (2, "a STOP b c ", 3), (4, None, 3)):
        deltas, stream = run(pieces, stop=["STOP"], min_tokens=min_tokens)
        assert "".join(deltas) == ("a STOP b c STOP" if text is None else text)
        assert stream.num_tokens == num
    # begun before the minimum, complete after it
    deltas, stream = run([b"x ST", b"OP"], stop=["STOP"], min_tokens=2)
    assert "".join(deltas) == "x " and stream.stop_reason == "STOP"


def test_special_tokens_are_counted_and_not_shown():
    stream = TextStream(Pieces([b"a"]))
    assert stream.push(0) + stream.push(-1) == "a" and stream.num_tokens == 2
    shown = TextStream(Pieces([b"a"]), skip_special_tokens=False)
    assert shown.push(0) + shown.push(-1) == "a<eos>"


def test_after_a_match_there_is_nothing_more():
    _, stream = run([b"aXb", b"c"], stop=["X"])
    assert stream.push(1) == "" and stream.finish() == "" and stream.num_tokens == 1


@given(
    text=st.text(alphabet="ab\n é한😀", max_size=40),
    stop=st.lists(st.text(alphabet="ab\n é", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(min_value=0, max_value=160), max_size=40),
    include=st.booleans(),
)
def test_any_cut_of_the_bytes_gives_the_same_text(
    text: str, stop: list[str], cuts: list[int], include: bool
):
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    deltas, stream = run(pieces, stop=stop, include_stop_str_in_output=include)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if ends:
        end, start, matched = min(ends)
        assert stream.stop_reason == matched
        assert "".join(deltas) == text[: end if include else start]
    else:
        assert "".join(deltas) == text and stream.stop_reason is None
        assert stream.num_tokens == len(pieces)
    assert "\ufffd" not in "".join(deltas)


@given(data=st.binary(max_size=60))
def test_any_bytes_decode_as_a_whole(data: bytes):
    deltas, _ = run([data[i : i + 1] for i in range(len(data))])
    assert "".join(deltas) == data.decode("utf-8", "replace")


def test_each_token_is_decoded_once_and_the_answer_is_not_kept():
    class Counting(Pieces):
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return super().token_bytes(token_id)

    tokenizer = Counting([b"a word\n"])
    stream = TextStream(tokenizer, stop=["\n\nUser:"])
    for _ in range(2_000):
        assert len(stream.push(0)) == 7 or stream.num_tokens == 1
    assert tokenizer.calls == 2_000
    assert stream.finish() == "\n"
