"""What a rank's files say about its end."""

import json

from rankwatch.monitor.crash import crash_on_disk, from_error_file, from_log, user_frame
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
