"""The engine's loop, turn by turn, over a socket inside this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from harness import Tiny
from stairs.config import SamplingParams
from stairs.engine.core import Engine
from stairs.engine.sequence import FinishReason
from stairs.server import wire
from stairs.server.engine_process import EngineLoop

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Parent:
    """The HTTP side: sends commands, has the loop take a turn, and reads its report."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.bind("inproc://engine")
        other = self.context.socket(zmq.PAIR)
        other.connect("inproc://engine")
        self.other = other
        self.loop = EngineLoop(engine, other)

    def turn(self, *commands: wire.Command) -> wire.Step:
        for command in commands:
            self.socket.send(msgspec.msgpack.encode(command))
        self.loop.turn()
        report = msgspec.msgpack.decode(self.socket.recv(), type=wire.Report)
        assert isinstance(report, wire.Step)
        return report

    def close(self) -> None:
        self.socket.close()
        self.other.close()
        self.context.term()


@pytest.fixture
def parent(tiny_llama: Tiny) -> Iterator[Parent]:
    found = Parent(tiny_llama.engine(num_blocks=64))
    yield found
    found.close()


def test_a_request_from_start_to_end(parent: Parent) -> None:
    first = parent.turn(wire.Add(7, [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [request for request, _ in first.accepted] == [7]
    assert [request for request, _ in first.started] == [7]
    assert first.stats.running == 1 and first.stats.step_tokens == 3
    reports = [first, parent.turn(), parent.turn()]
    events = [event for report in reports for event in report.events]
    assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]
    assert events[-1].costs is not None and events[0].costs is None
    assert reports[-1].stats.running == reports[-1].stats.blocks_owned == 0
    assert reports[-1].stats.pairs_counted == reports[-1].stats.pairs_predicted > 0


def test_an_abort_frees_the_blocks_in_the_next_report(parent: Parent) -> None:
    parent.turn(wire.Add(1, [5] * 40, LONG), wire.Add(2, [6] * 40, LONG))
    report = parent.turn(wire.Abort(1), wire.Abort(2))
    assert report.stats.running == report.stats.blocks_owned == 0
    assert sorted(ended.request for ended in report.ended) == [1, 2]
    assert not report.events


def test_one_answer_of_several_can_end(parent: Parent) -> None:
    both = SamplingParams(n=2, max_tokens=50, ignore_eos=True)
    parent.turn(wire.Add(1, [5, 6], both))
    report = parent.turn(wire.Abort(1, index=0))
    assert [event.index for event in report.events] == [1] and not report.ended
    assert [ended.request for ended in parent.turn(wire.Abort(1, index=1)).ended] == [1]


def test_an_abort_of_what_has_ended_is_nothing(parent: Parent) -> None:
    parent.turn(wire.Add(1, [5], SamplingParams(max_tokens=1)))
    report = parent.turn(wire.Abort(1), wire.Abort(99))
    assert not report.ended and not report.refused


def test_a_refusal_names_the_request(parent: Parent) -> None:
    report = parent.turn(wire.Add(3, [], LONG), wire.Add(4, [5] * 5000, LONG))
    assert [(r.request, r.code) for r in report.refused] == [
        (3, "invalid_request"),
        (4, "context_length_exceeded"),
    ]
    for refused in report.refused:
        error = wire.refusal(refused.code, refused.message, refused.param)
        assert error.status == 400 and error.param == refused.param
    assert not parent.engine.has_work


def test_a_prefix_is_computed_saved_and_read_again(
    parent: Parent, tiny_llama: Tiny, tmp_path: Path
) -> None:
    file = tmp_path / "kept" / "prefix.safetensors"
    pin = wire.Pin(1, "guide", [5, 6, 7, 8] * 10, file=str(file))
    (pinned,) = parent.turn(pin).pinned
    assert (pinned.num_tokens, pinned.num_pinned_tokens, pinned.source) == (40, 32, "computed")
    assert parent.turn(wire.Unpin("guide")).stats.blocks_pinned == 0

    fresh = Parent(tiny_llama.engine(num_blocks=64))
    (again,) = fresh.turn(pin).pinned
    assert again.source == "file" and again.kv_bytes == pinned.kv_bytes
    report = fresh.turn(wire.Add(2, [5, 6, 7, 8] * 10, SamplingParams(max_tokens=1)))
    assert report.events[0].num_cached_tokens == 32
    fresh.close()


def test_a_file_that_is_not_that_prefix_is_computed_over(parent: Parent, tmp_path: Path) -> None:
    file = tmp_path / "prefix.safetensors"
    file.write_bytes(b"not safetensors")
    (pinned,) = parent.turn(wire.Pin(1, "guide", [5] * 40, file=str(file))).pinned
    assert pinned.source == "computed"
