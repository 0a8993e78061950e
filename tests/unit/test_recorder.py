"""Event segments give back every event that was flushed, across rotations, crashes and resumes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event, RankBack, RunEnded, encode_event
from tiderl.store.recorder import HashRecorder, SegmentRecorder, read_events, segments


def event(number: int, t_s: float = 0.0) -> RankBack:
    return RankBack(t_s=t_s, rank=number)


def ranks(directory: Path) -> list[int]:
    return [found.rank for found in read_events(directory) if isinstance(found, RankBack)]


def test_all_events_come_back_in_order(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path)
    for number in range(100):
        recorder.emit(event(number, number * 0.1))
    recorder.emit(RunEnded(t_s=10.0, outcome="done", updates=3))
    recorder.close()
    recorder.close()
    assert ranks(tmp_path) == list(range(100))
    assert list(read_events(tmp_path))[-1] == RunEnded(t_s=10.0, outcome="done", updates=3)


def test_events_are_readable_after_a_second_without_close(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path)
    recorder.emit(event(0, 0.2))
    assert ranks(tmp_path) == []
    recorder.emit(event(1, 1.0))
    recorder.emit(event(2, 1.5))
    assert ranks(tmp_path) == [0, 1]
    recorder.flush()
    assert ranks(tmp_path) == [0, 1, 2]


def test_what_came_before_an_event_that_counts_is_readable_with_it(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path, flush_after=(RunEnded,))
    recorder.emit(event(0))
    assert ranks(tmp_path) == []
    recorder.emit(RunEnded(t_s=0.0, outcome="done", updates=3))
    assert ranks(tmp_path) == [0]


def test_large_run_rotates_its_segments(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path, segment_bytes=500)
    for number in range(50):
        recorder.emit(event(number, float(number)))
    recorder.close()
    assert len(segments(tmp_path)) > 3
    assert ranks(tmp_path) == list(range(50))


def test_resumed_run_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    for start in (0, 10):
        recorder = SegmentRecorder(tmp_path)
        for number in range(start, start + 10):
            recorder.emit(event(number))
        recorder.close()
    assert [path.name for path in segments(tmp_path)] == ["events-000001.jsonl.gz", "events-000002.jsonl.gz"]
    assert ranks(tmp_path) == list(range(20))


def test_torn_end_is_left_out_at_every_byte(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path)
    for number in range(10):
        recorder.emit(event(number, float(number)))  # a flush for each
    recorder.close()
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    longest = 0
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        found = ranks(tmp_path)
        assert found == list(range(len(found)))
        assert len(found) >= longest
        longest = len(found)
    assert longest == 10


def test_segments_after_a_torn_one_are_read(tmp_path: Path) -> None:
    for start in (0, 10):
        recorder = SegmentRecorder(tmp_path)
        recorder.emit(event(start))
        recorder.flush()
        recorder.emit(event(start + 1))
        recorder.close()
    first = segments(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-30])
    assert ranks(tmp_path)[-2:] == [10, 11]


def test_line_that_is_no_event_is_a_fault(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "events-000001.jsonl.gz", "wb") as file:
        file.write(b'{"events_version": 1}\n{"kind": "unheard_of"}\n')
    with pytest.raises(CheckpointError, match="line 2 is no event"):
        list(read_events(tmp_path))


def test_newer_events_are_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "events-000001.jsonl.gz", "wb") as file:
        file.write(b'{"events_version": 99}\n')
    with pytest.raises(CheckpointError, match="version 99"):
        list(read_events(tmp_path))


def test_closed_recorder_refuses_events(tmp_path: Path) -> None:
    recorder = SegmentRecorder(tmp_path)
    recorder.close()
    with pytest.raises(CheckpointError):
        recorder.emit(event(0))


def test_hash_is_that_of_the_lines() -> None:
    import hashlib

    class Kept:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def emit(self, event: Event) -> None:
            self.events.append(event)

    kept = Kept()
    recorder = HashRecorder(kept)
    for number in range(3):
        recorder.emit(event(number))
    lines = b"".join(encode_event(found) + b"\n" for found in kept.events)
    assert recorder.sha256 == hashlib.sha256(lines).hexdigest()
    assert recorder.events == len(kept.events) == 3
