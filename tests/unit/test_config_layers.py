"""Options: precedence, origins, and what is refused in which words."""

from __future__ import annotations

import os
import sys

import pytest

from rankwatch import config
from rankwatch.config import OPTIONS, ConfigError, Options, load
from rankwatch.monitor.policy import Limits

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in 3.11")


def file(tmp_path, text, name="config.toml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_contract():
    assert load((), {}, ()) == Options(
        run_dir=None,
        run_dir_mode=0o700,
        listen="127.0.0.1:27435",
        external_url="",
        token_file="",
        peers="",
        peer_address="",
        stuck_after_s=None,
        limits={},
        no_probe=(),
        labels={},
        owner="",
        metrics_level="auto",
        log_format="logfmt",
        on_incident="",
    )


def test_every_value_has_an_origin():
    origins = load((), {}, ()).origins
    assert set(origins) == {option.field for option in OPTIONS}
    assert set(origins.values()) == {"default"}


@needs_toml
def test_each_layer_wins_over_the_one_before(tmp_path):
    weak = file(tmp_path, 'owner = "weak"\nlog-format = "json"\nlisten = "off"\nrun-dir = "/weak"', "weak.toml")
    strong = file(tmp_path, 'owner = "strong"\nlisten = "0.0.0.0:1"\nrun_dir = "/strong"', "strong.toml")
    named = file(tmp_path, 'owner = "named"\nrun-dir = "/named"', "named.toml")
    environ = {"RANKWATCH_CONFIG": named, "RANKWATCH_OWNER": "environment"}
    options = load([("owner", "flag")], environ, (weak, strong))
    assert (options.owner, options.origins["owner"]) == ("flag", "command line")
    assert (options.run_dir, options.origins["run_dir"]) == ("/named", named)
    assert (options.listen, options.origins["listen"]) == ("0.0.0.0:1", strong)
    assert (options.log_format, options.origins["log_format"]) == ("json", weak)
    assert load((), environ, (weak, strong)).owner == "environment"
    assert load((), environ, (weak, strong)).origins["owner"] == "RANKWATCH_OWNER"


@needs_toml
def test_tables_are_merged_by_name_and_lists_replaced(tmp_path):
    path = file(tmp_path, 'no-probe = ["ddp"]\n[labels]\nteam = "vision"\ntier = "low"\n[limits]\nnotice_s = 7\n')
    options = load([("label", "tier=high"), ("no-probe", "steps"), ("no-probe", "compile")], {"RANKWATCH_LIMIT": "poll_s=0.5,first_s=2m"}, (path,))
    assert options.labels == {"team": "vision", "tier": "high"}
    assert options.origins["labels.team"] == path
    assert options.origins["labels.tier"] == "command line"
    assert options.limits == {"notice_s": 7.0, "poll_s": 0.5, "first_s": 120.0}
    assert options.no_probe == ("steps", "compile")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), (".5", 0.5)],
)
def test_durations_take_a_unit(text, seconds):
    assert load([("stuck-after", text)], {}, ()).stuck_after_s == seconds


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("stuck-after", "soon", "a number with s, m or h"),
        ("stuck-after", "0", "above 0"),
        ("stuck-after", "-3", "a number with s, m or h"),
        ("listen", "27435", "HOST:PORT"),
        ("listen", "host:99999", "HOST:PORT"),
        ("listen", "::1:80", "[::1]:27435"),
        ("run-dir-mode", "0077", "owner's rwx"),
        ("run-dir-mode", "rwx", "octal"),
        ("run-dir", "", "a path"),
        ("metrics-level", "most", "auto, low, default or full"),
        ("log-format", "xml", "logfmt or json"),
        ("external-url", "ftp://x", "http:// or https://"),
        ("no-probe", "nvml", "compile, ddp, cudagraph, steps, collectives, memory or gpu"),
        ("label", "novalue", "K=V"),
        ("label", "9x=1", "K=V with K of letters"),
        ("label", "__name__=1", "__"),
        ("limit", "notice_s=soon", "seconds"),
        ("peers", "", "a path"),
        ("peer-address", "node 5", "HOST or HOST:PORT"),
        ("peer-address", "node5:", "HOST or HOST:PORT"),
        ("peer-address", "10.0.0.5:0", "a port from 1 to 65535"),
        ("peer-address", "fd00::5:x", "[fd00::5]:27480"),
        ("peer-address", "[fd00::5", "[fd00::5]:27480"),
        ("peer-address", "http://node5", "HOST or HOST:PORT"),
    ],
)
def test_a_bad_value_is_refused_with_flag_value_and_what_is_accepted(name, value, accepted):
    with pytest.raises(ConfigError) as error:
        load([(name, value)], {}, ())
    assert str(error.value).startswith(f"--{name}: {value!r} is not accepted; it takes ")
    assert accepted in str(error.value)


@pytest.mark.parametrize("value", ["127.0.0.1:0", "[::1]:27435", "node-7.cluster:9", "off"])
def test_listen_takes_hosts_ipv6_and_off(value):
    assert load([("listen", value)], {}, ()).listen == value


@pytest.mark.parametrize("value", ["node-5.cluster", "node5:27480", "10.0.0.5", "fd00::5", "[fd00::5]:27480", "[fe80::1%eth0]:9"])
def test_a_peer_address_takes_hosts_with_and_without_a_port(value):
    assert load([("peer-address", value)], {}, ()).peer_address == value


IGNORED = "; it is ignored: correct it there, `rankwatch config` shows what holds instead"


def test_a_bad_variable_is_a_warning_and_ignored():
    options = load((), {"RANKWATCH_LISTEN": "x"}, ())
    assert options.warnings == (f"RANKWATCH_LISTEN: 'x' is not accepted; it takes HOST:PORT such as 127.0.0.1:27435 or [::1]:27435, or off{IGNORED}",)
    assert (options.listen, options.origins["listen"]) == ("127.0.0.1:27435", "default")


@needs_toml
def test_a_bad_value_in_a_file_is_a_warning_that_names_file_key_and_cause_and_the_value_before_it_stays(tmp_path):
    weak, strong = file(tmp_path, "stuck-after = 60", "weak.toml"), file(tmp_path, "stuck-after = true", "strong.toml")
    options = load((), {}, (weak, strong))
    assert options.warnings == (f"{strong}: stuck-after: True is not accepted; it takes seconds, or a number with s, m or h, such as 90, 90s, 1.5m{IGNORED}",)
    assert (options.stuck_after_s, options.origins["stuck_after_s"]) == (60.0, weak)


@needs_toml
@pytest.mark.parametrize("value", ['"https://hooks.example/a"', '["https://hooks.example/a"]'])
def test_a_list_of_one_may_be_written_as_a_string_in_a_file(tmp_path, value):
    assert load((), {}, (file(tmp_path, f"webhook = {value}"),)).webhook == ("https://hooks.example/a",)


def test_several_in_a_string_are_read_as_in_a_variable(tmp_path):
    assert load((), {}, (file(tmp_path, 'no-probe = "memory, gpu"'),)).no_probe == ("memory", "gpu")


def test_of_a_table_and_a_list_in_a_file_only_the_bad_items_are_ignored(tmp_path):
    path = file(tmp_path, 'no-probe = ["ddp", "nvml"]\n[label]\nteam = "vision"\n9x = "y"\n[limit]\nnotce_s = 3\nnotice_s = 7\nstuck_ratio = 50\nstack_s = -4')
    options = load((), {}, (path,), limits=Limits)
    assert (options.no_probe, options.labels, options.limits) == (("ddp",), {"team": "vision"}, {"notice_s": 7.0})
    assert options.warnings == (
        f"{path}: no-probe: 'nvml' is not accepted; it takes compile, ddp, cudagraph, steps, collectives, memory or gpu{IGNORED}",
        f"{path}: label: '9x=y' is not accepted; it takes K=V with K of letters, digits and _ that does not begin with a digit or __{IGNORED}",
        f"{path}: limit: 'notce_s=3' is not accepted; there is no limit notce_s (did you mean notice_s?); rankwatch config --limits lists them{IGNORED}",
        f"{path}: limit: 'stuck_ratio=50' is not accepted; it takes a share above 0 and not above 1, such as 0.2{IGNORED}",
        f"{path}: limit: 'stack_s=-4' is not accepted; it takes seconds above 0 and not negative, such as 5, 90s, 1.5m{IGNORED}",
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("notce_s=3", "there is no limit notce_s (did you mean notice_s?)"),
        ("nothing_alike=3", "there is no limit nothing_alike; rankwatch config --limits lists them"),
        ("stuck_ratio=50", "a share above 0 and not above 1"),
        ("notice_s=-4", "not negative"),
        ("agree_polls=1.5", "a whole number from 1 on"),
    ],
)
def test_a_limit_of_the_command_line_is_checked_by_name_and_range(given, words):
    with pytest.raises(ConfigError) as error:
        load([("limit", given)], {}, (), limits=Limits)
    assert str(error.value).startswith(f"--limit: {given!r} is not accepted; ")
    assert words in str(error.value)


@needs_toml
def test_limits_that_contradict_each_other_give_way_to_the_command_line(tmp_path):
    path = file(tmp_path, "stuck-after = 60\n[limit]\nstuck_max_s = 30\nnotice_s = 7")
    options = load((), {}, (path,), limits=Limits)
    assert (options.stuck_after_s, options.limits) == (60.0, {"notice_s": 7.0})
    assert options.warnings == (f"{path}: limit stuck_max_s: limit stuck_min_s (60) is above stuck_max_s (30){IGNORED}",)
    options = load([("limit", "stuck_max_s=30")], {}, (path,), limits=Limits)
    assert (options.stuck_after_s, options.limits) == (None, {"stuck_max_s": 30.0, "notice_s": 7.0})
    with pytest.raises(ConfigError, match=r"--limit: limit stuck_min_s \(60\) is above stuck_max_s \(30\)"):
        load([("limit", "stuck_max_s=30"), ("stuck-after", "60")], {}, (), limits=Limits)


@needs_toml
def test_an_unknown_key_is_a_warning_that_names_the_nearest(tmp_path):
    path = file(tmp_path, 'ownr = "me"')
    options = load((), {}, (path,))
    assert options.warnings == (f"{path}: unknown key 'ownr' is ignored (did you mean owner?)",)
    assert options.owner == ""


@needs_toml
def test_a_file_that_is_no_toml_is_not_used_and_said(tmp_path):
    path = file(tmp_path, "owner = ")
    (warning,) = load((), {}, (path,)).warnings
    assert warning.startswith(f"{path} is not used: it is no TOML file: Invalid value")
    assert warning.endswith("; correct it, or move it away")


def test_the_file_named_by_the_variable_should_exist():
    assert load((), {"RANKWATCH_CONFIG": "/nowhere/x.toml"}, ()).warnings == (
        "RANKWATCH_CONFIG names '/nowhere/x.toml', which does not exist; correct the path or unset RANKWATCH_CONFIG",
    )


def test_files_without_tomllib_are_not_used_and_said_only_when_one_exists(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert load((), {}, (str(tmp_path / "absent.toml"),)).warnings == ()
    path = file(tmp_path, "")
    assert load((), {}, (path,)).warnings == (
        f"{path} is not used: files need Python 3.11 or newer; use RANKWATCH_<NAME> variables or flags, or move the file away",
    )


@needs_toml
def test_a_file_of_the_working_directory_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rankwatch.toml").write_text('on-incident = "rm -rf ."')
    (tmp_path / "rankwatch.toml").chmod(0o666)
    options = load((), {}, ("rankwatch.toml",))
    assert options.on_incident == ""
    assert "RANKWATCH_CONFIG=./rankwatch.toml" in options.warnings[0]
    (tmp_path / "rankwatch.toml").chmod(0o644)
    assert load((), {}, ("rankwatch.toml",)).on_incident == "rm -rf ."


@needs_toml
def test_a_file_of_the_working_directory_that_the_group_may_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rankwatch.toml").write_text('owner = "me"')
    (tmp_path / "rankwatch.toml").chmod(0o664)
    assert load((), {}, ("rankwatch.toml",)).owner == ""


@needs_toml
def test_pipes_devices_and_huge_files_hold_nothing_up(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "huge").write_bytes(b"#" * ((1 << 20) + 1))
    (tmp_path / "large").write_bytes(b"#" * (1 << 20))
    paths = (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), str(tmp_path / "huge"), str(tmp_path / "large"))
    assert load((), {}, paths).warnings == (
        f"{paths[0]} is not used: it cannot be read (it is no regular file)",
        "/dev/zero is not used: it cannot be read (it is no regular file)",
        f"{paths[2]} is not used: it cannot be read (it is no regular file)",
        f"{paths[3]} is not used: it cannot be read (it is larger than 1 MiB)",
    )
    assert "no regular file" in load((), {"RANKWATCH_CONFIG": paths[0]}, ()).warnings[0]


def test_a_run_dir_of_a_user_who_does_not_exist_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--run-dir: '~nosuchuser/x' is not accepted; it takes a path, and there is no user 'nosuchuser' here"):
        load([("run-dir", "~nosuchuser/x")], {}, ())
    assert load([("run-dir", "~/x")], {}, ()).run_dir == "~/x"


def test_the_help_names_a_number_that_exists():
    option = next(option for option in OPTIONS if option.name == "limit")
    assert ": notice_s=10;" in option.help
    assert hasattr(Limits(), "notice_s")


def test_names_between_launcher_and_ranks_are_no_options():
    environ = {"RANKWATCH_SLOT_DIR": "/x", "RANKWATCH_CLAIMED": "7", "RANKWATCH_NO_PROBES": "ddp", "RANKWATCH_ATTEMPT": "0", "RANKWATCH_WHATEVER": "1"}
    options = load((), environ, ())
    assert options == Options()
    assert options.warnings == ()


def test_a_slip_in_a_variable_is_a_warning():
    assert load((), {"RANKWATCH_RUNDIR": "/x"}, ()).warnings == ("RANKWATCH_RUNDIR is no option of rankwatch and is ignored (did you mean RANKWATCH_RUN_DIR?)",)


def test_an_empty_variable_is_no_value():
    assert load((), {"RANKWATCH_LISTEN": ""}, ()).listen == "127.0.0.1:27435"


def test_the_listing_hides_a_password_in_an_address():
    rows = config.describe(load([("external-url", "https://me:secret@host/x")], {}, ()))
    assert ("external-url", "https://***@host/x", "command line") in rows


def test_a_probe_is_switched_on_by_name_with_or_without_its_steps(tmp_path):
    assert load([("probe", "numerics=10")], {}, []).probe == ("numerics=10",)
    assert load([], {"RANKWATCH_PROBE": "numerics"}, []).probe == ("numerics",)
    for wrong in ("numeric", "numerics=", "numerics=0", "numerics=x", "compile"):
        with pytest.raises(ConfigError, match=r"--probe: .* it takes numerics, also as NAME=STEPS"):
            load([("probe", wrong)], {}, [])


def test_a_switch_is_true_or_false_in_every_layer(tmp_path):
    assert load([], {}, []).torch_trace is False
    assert load([("torch-trace", "true")], {}, []).torch_trace is True
    assert load([("torch-trace", "false")], {"RANKWATCH_TORCH_TRACE": "1"}, []).torch_trace is False
    assert load([], {"RANKWATCH_TORCH_TRACE": "x"}, []).warnings == (f"RANKWATCH_TORCH_TRACE: 'x' is not accepted; it takes true or false{IGNORED}",)
    with pytest.raises(ConfigError, match="--torch-trace: 'x' is not accepted; it takes true or false"):
        load([("torch-trace", "x")], {}, [])
