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
        ("no-probe", "gpu", "compile, ddp, cudagraph, steps or collectives"),
        ("label", "novalue", "K=V"),
        ("label", "9x=1", "K=V with K of letters"),
        ("label", "__name__=1", "__"),
        ("limit", "notice_s=soon", "seconds"),
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


def test_a_bad_variable_is_named():
    with pytest.raises(ConfigError, match=r"^RANKWATCH_LISTEN: 'x' is not accepted"):
        load((), {"RANKWATCH_LISTEN": "x"}, ())


@needs_toml
def test_a_bad_value_in_a_file_names_the_file_and_the_key(tmp_path):
    path = file(tmp_path, "stuck-after = true")
    with pytest.raises(ConfigError) as error:
        load((), {}, (path,))
    assert str(error.value) == f"{path}: stuck-after: True is not accepted; it takes seconds, or a number with s, m or h, such as 90, 90s, 1.5m"


@needs_toml
def test_an_unknown_key_is_a_warning_that_names_the_nearest(tmp_path):
    path = file(tmp_path, 'ownr = "me"')
    options = load((), {}, (path,))
    assert options.warnings == (f"{path}: unknown key 'ownr' is ignored (did you mean owner?)",)
    assert options.owner == ""


@needs_toml
def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = file(tmp_path, "owner = ")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load((), {}, (path,))


def test_the_file_named_by_the_variable_must_exist():
    with pytest.raises(ConfigError, match=r"RANKWATCH_CONFIG names '/nowhere/x.toml', which does not exist"):
        load((), {"RANKWATCH_CONFIG": "/nowhere/x.toml"}, ())


def test_files_without_tomllib_are_an_error_only_when_one_exists(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert load((), {}, (str(tmp_path / "absent.toml"),)).owner == ""
    path = file(tmp_path, "")
    with pytest.raises(ConfigError, match=r"files need Python 3.11 or newer"):
        load((), {}, (path,))


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
    with pytest.raises(ConfigError, match="no regular file"):
        load((), {"RANKWATCH_CONFIG": paths[0]}, ())


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
