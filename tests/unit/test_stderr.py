"""Our lines on stderr: whole, in order, and never at the price of waiting."""

import fcntl
import io
import os
import sys
import time

import pytest

from rankwatch import stderr
from rankwatch.stderr import Stderr


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def lines(pipe):
    own = stderr._own_descriptor(pipe[1])
    yield Stderr(own)
    os.close(own)


def fill(fd):
    """The whole pipe, through a description of its own."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(own, b"x" * 512)
    except BlockingIOError:
        pass
    finally:
        os.close(own)


def test_a_line_goes_out(lines, pipe):
    assert lines.write("a\n") == 2
    assert lines.offer("\udc80é\n")
    assert os.read(pipe[0], 100) == "a\n\\udc80é\n".encode()


def test_the_jobs_own_descriptor_stays_blocking(lines, pipe):
    assert os.get_blocking(pipe[1])


def test_a_full_pipe_costs_the_main_thread_one_short_wait_and_is_counted(lines, pipe):
    fill(pipe[1])
    began = time.monotonic()
    assert [lines.offer("a\n") for _ in range(100)] == [False] * 100
    assert time.monotonic() - began < 5 * stderr.OFFER_S
    assert lines.dropped == 100
    os.read(pipe[0], 1 << 16)
    assert lines.offer("b\n")
    assert os.read(pipe[0], 100) == b"b\n"


def test_a_full_pipe_makes_the_announcers_thread_wait_so_long_and_no_longer(lines, pipe, monkeypatch):
    monkeypatch.setattr(stderr, "PATIENCE_S", 0.1)
    fill(pipe[1])
    with pytest.raises(BlockingIOError):
        lines.write("a\n")
    assert lines.dropped == 1


def test_a_blocking_descriptor_is_not_written_to_while_it_is_full(pipe):
    fill(pipe[1])
    assert not Stderr(pipe[1]).offer("a\n")


def test_a_block_longer_than_the_pipe_goes_out_as_far_as_it_is_read_and_ends_its_line(lines, pipe, monkeypatch):
    monkeypatch.setattr(stderr, "PATIENCE_S", 0.1)
    with pytest.raises(BlockingIOError):
        lines.write("".join(f"{number:09d}\n" for number in range(1000)))
    assert os.read(pipe[0], 1 << 16).splitlines()[-1] == b"000000408"
    lines.write("next\n")
    assert os.read(pipe[0], 100) == b"next\n"


def test_a_line_that_lost_its_end_is_ended_before_the_next(lines, pipe, monkeypatch):
    monkeypatch.setattr(stderr, "PATIENCE_S", 0.1)
    with pytest.raises(BlockingIOError):
        lines.write("y" * 5000 + "\n")
    assert os.read(pipe[0], 1 << 16) == b"y" * 4096
    lines.write("next\n")
    assert os.read(pipe[0], 100) == b"\nnext\n"


def test_a_reader_that_has_gone_is_an_error_and_an_offer_that_failed():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        with pytest.raises(BrokenPipeError):
            Stderr(write_end).write("a\n")
        assert not Stderr(write_end).offer("a\n")
    finally:
        os.close(write_end)


def test_a_closed_stderr_takes_everything_and_shows_nothing(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    assert stderr.current().write("a\n") == 2
    assert stderr.current().offer("b\n")
    assert capfd.readouterr() == ("", "")


def test_a_stream_in_stderrs_place_gets_the_lines(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    stderr.current().write("a\n")
    stderr.current().offer("b\n")
    stderr.current().flush()
    assert stream.getvalue() == "a\nb\n"
    stream.close()
    assert not stderr.current().offer("c\n")
