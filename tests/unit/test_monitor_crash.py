"""What a rank's files say about its end."""

import json

from rankwatch.monitor.crash import crash_on_disk, from_error_file, from_log, links_before, user_frame
from rankwatch.monitor.workers import Worker

TRACEBACK = """Traceback (most recent call last):
  File "/home/u/train.py", line 31, in main
    load_batch()
  File "/home/u/data.py", line 7, in load_batch
    torch.stack([])
  File "/opt/venv/lib/python3.11/site-packages/torch/functional.py", line 9, in stack
    raise RuntimeError("stack expects a non-empty TensorList")
RuntimeError: stack expects a non-empty TensorList
"""


def test_torchelastics_error_file_gives_type_message_and_place(tmp_path):
    path = tmp_path / "error.json"
    extra = {"py_callstack": TRACEBACK, "timestamp": "1796019780"}
    path.write_text(json.dumps({"message": {"message": "RuntimeError: stack expects a non-empty TensorList", "extraInfo": extra}}))
    crash = from_error_file(str(path))
    assert (crash.type, crash.message, crash.where, crash.at_wall) == (
        "RuntimeError",
        "stack expects a non-empty TensorList",
        "data.py:7:load_batch",
        1796019780.0,
    )
    assert crash.source == f"error file {path}"


def test_the_last_traceback_of_a_log_counts_with_torchs_prefixes_removed(tmp_path):
    path = tmp_path / "stderr.log"
    noise = 'Traceback (most recent call last):\n  File "x.py", line 1, in a\nOSError: handled\n'
    path.write_text(noise + "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()) + "later line\n")
    crash = from_log(str(path))
    assert (crash.type, crash.message, crash.where) == ("RuntimeError", "stack expects a non-empty TensorList", "data.py:7:load_batch")
    assert crash.traceback == TRACEBACK.rstrip("\n")


def test_the_error_file_goes_before_the_log(tmp_path):
    (tmp_path / "e").write_text(json.dumps({"message": "ValueError: from the file"}))
    (tmp_path / "log").write_text(TRACEBACK)
    assert crash_on_disk(Worker(0, 0, 1, stderr=str(tmp_path / "log"), error_file=str(tmp_path / "e"))).message == "from the file"
    assert crash_on_disk(Worker(0, 0, 1, stderr=str(tmp_path / "log"))).type == "RuntimeError"
    assert crash_on_disk(Worker(0, 0, 1)) is None


def test_odd_files_say_nothing(tmp_path):
    for text in ("", "[]", "{", '{"message": null}', '{"message": {"message": 5}}', '{"message": {"message": "x", "extraInfo": 7}}'):
        (tmp_path / "e").write_text(text)
        from_error_file(str(tmp_path / "e"))
        from_log(str(tmp_path / "e"))
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 400)
    assert from_log(str(tmp_path / "binary")) is None
    assert from_log(str(tmp_path)) is None


def test_without_user_code_the_innermost_frame_is_named():
    assert user_frame('  File "/x/site-packages/torch/a.py", line 3, in f\n') == "a.py:3:f"
    assert user_frame("") == ""


def test_the_cpp_exception_that_ended_a_process_counts_before_an_older_traceback(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/job/train.py", line 3, in step\nValueError: caught and printed\n'
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 944 vs 940. Received data size doesn't match expected size.\n"
    )
    crash = from_log(str(log))
    assert crash.type == "gloo::EnforceNotMet"
    assert crash.message.startswith("[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 944 vs 940.")


FAULT = """rank 1 trains
Fatal Python error: Segmentation fault

Thread 0x00007f1c2d7fa640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f1c3d9c0740 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/job/train.py", line 12 in decode_image
  File "/job/train.py", line 40 in <module>

Extension modules: torch._C (total: 1)
"""


def test_what_faulthandler_writes_at_a_fatal_signal_is_read_with_its_line(tmp_path):
    log = tmp_path / "log"
    log.write_text('Traceback (most recent call last):\n  File "/job/a.py", line 1, in f\nValueError: caught long ago\n' + FAULT)
    crash = from_log(str(log))
    assert (crash.type, crash.message, crash.where) == ("Fatal Python error", "Segmentation fault", "train.py:12:decode_image")
    assert crash.traceback.splitlines()[1:] == [
        '  File "/job/train.py", line 40, in <module>',
        '  File "/job/train.py", line 12, in decode_image',
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519, in string_at',
    ]


def test_a_cxx_exception_says_more_than_the_abort_that_follows_it(tmp_path):
    log = tmp_path / "log"
    log.write_text("terminate called after throwing an instance of 'c10::Error'\n  what():  no peer\n" + FAULT.replace("Segmentation fault", "Aborted"))
    crash = from_log(str(log))
    assert (crash.type, crash.message, crash.where) == ("c10::Error", "no peer", "train.py:12:decode_image")


def test_a_traceback_that_a_lot_was_written_after_is_of_an_exception_that_was_caught(tmp_path):
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in load\n    load()\nOSError: no route\n'
    path = tmp_path / "stderr.log"
    path.write_text(text + "step: loss 0.1\n" * 60)
    assert from_log(str(path)) is None
    frames = (f"frame #{n}: c10::Error (0x7f in /lib/libc10.so)" for n in range(80))
    path.write_text(text + "\n".join(["in two lines", *frames, "[W1130 10:11:12.5 x.cpp:1] bye"]))
    assert from_log(str(path)).type == "OSError"


LOST = "RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5031"
CHAINED = f"""Traceback (most recent call last):
  File "/job/shards.py", line 4, in read
    return self.index[number]
KeyError: 17

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 12, in step
    dist.all_reduce(x)
{LOST}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 14, in step
    raise TrainingError(f"step {{number}} failed") from error
__main__.TrainingError: step 31 failed
"""
LINKS = (("RuntimeError", LOST.partition(": ")[2]), ("KeyError", "17"))


def test_what_an_exception_came_of_is_read_with_it(tmp_path):
    (tmp_path / "log").write_text("step 30\n" + "".join(f"[rank1]: {line}\n" for line in CHAINED.splitlines()))
    found = from_log(str(tmp_path / "log"))
    assert (found.type, found.message, found.where, found.chain) == ("__main__.TrainingError", "step 31 failed", "train.py:14:step", LINKS)
    error = {"message": {"message": "TrainingError: step 31 failed", "extraInfo": {"py_callstack": CHAINED, "timestamp": "5"}}}
    (tmp_path / "e").write_text(json.dumps(error))
    assert from_error_file(str(tmp_path / "e")).chain == LINKS


def test_an_older_traceback_of_the_log_is_nothing_that_the_last_one_came_of(tmp_path):
    (tmp_path / "log").write_text(TRACEBACK + "\nretrying\n" + TRACEBACK)
    assert from_log(str(tmp_path / "log")).chain == ()
    (tmp_path / "log").write_text(TRACEBACK + "\nretrying\n" + CHAINED)
    assert from_log(str(tmp_path / "log")).chain == LINKS


def test_at_most_four_links_are_read_and_none_of_a_log_that_is_cut():
    during = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert links_before(9 * (TRACEBACK + during)) == 4 * (("RuntimeError", "stack expects a non-empty TensorList"),)
    assert links_before("ValueError: x" + during) == ()
    assert links_before("") == ()
