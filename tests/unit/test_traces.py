"""Stacks and tracebacks fold to what matters and a cut never loses the user's line."""

import pytest

from rankwatch import traces

LIBRARY = "/venv/lib/python3.11/site-packages/torch/a.py"


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/alice/train.py", False),
        ("/home/bob/rankwatch/train.py", False),
        ("/venv/lib/python3.11/site-packages/torch/_tensor.py", True),
        ("/usr/lib/python3.11/socket.py", True),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", True),
        ("/opt/rankwatch/agent/probes/compile.py", True),
        ("<frozen importlib._bootstrap>", True),
    ],
)
def test_whose_a_file_is(file, library):
    assert traces.is_library(file) is library


def test_a_stack_folds_library_frames_but_the_innermost():
    frames = [f"f{number} ({LIBRARY}:{number})" for number in range(4)] + ["main (/a/train.py:1)", f"run ({LIBRARY}:9)", "<module> (/a/train.py:2)"]
    assert traces.folded(frames) == [
        "f0 (torch/a.py:0)",
        "... 3 library frames",
        "main (/a/train.py:1)",
        "run (torch/a.py:9)",
        "<module> (/a/train.py:2)",
    ]


def frame(file, line, code="work()"):
    return f'  File "{file}", line {line}, in f{line}\n    {code}\n'


def test_a_traceback_folds_library_frames_but_what_raised():
    text = "Traceback (most recent call last):\n" + frame("/a/train.py", 1) + "".join(frame(LIBRARY, line) for line in range(2, 9)) + "ValueError: x\n"
    assert traces.traceback_rows(text, 40) == [
        "Traceback (most recent call last):",
        '  File "/a/train.py", line 1, in f1',
        "    work()",
        "  ... 6 library frames",
        f'  File "{LIBRARY}", line 8, in f8',
        "    work()",
        "ValueError: x",
    ]


@pytest.mark.parametrize("cut", [lambda text: "\n".join(traces.traceback_rows(text, 20)), lambda text: traces.clip_traceback(text, 2000)])
def test_a_long_traceback_keeps_head_tail_and_the_users_innermost_frame(cut):
    deep = "".join(frame(f"/a/lib{line}.py" if line % 2 else LIBRARY, line) for line in range(200))
    message = "\n".join(f"  size mismatch for layer {number}" for number in range(200))
    shown = cut(f"Traceback (most recent call last):\n{deep}{frame('/a/train.py', 777, 'model(x)')}RuntimeError: bad\n{message}\nthe end\n")
    for words in ("Traceback (most", "line 777, in f777", "model(x)", "lines left out", "the end"):
        assert words in shown
    assert len(shown) < 3000


def test_a_short_one_stays_as_it_is():
    text = "Traceback (most recent call last):\n" + frame("/a/train.py", 1) + "ValueError: x\n"
    assert traces.clip_traceback(text, 2000) == text
    assert "\n".join(traces.traceback_rows(text, 40)) + "\n" == text
    assert traces.traceback_rows("", 40) == []
