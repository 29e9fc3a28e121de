"""What the threat model of the README promises, line by line, each with the tests that show it; a test that is gone fails here.

A name ends a path: `file::test` or `file::Class::test`. It is found in the source, so nothing of these files is imported or run.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SERVER, CROWDS, TLS = "unit/test_serve_server.py", "unit/test_serve_crowds.py", "unit/test_serve_tls.py"
REQUESTS, PAGES, USERS = "unit/test_hostile_requests.py", "unit/test_hostile_pages.py", "unit/test_hostile_users.py"
PROGRAMS, REDACT = "stack/test_server_programs.py", "unit/test_report_redact.py"
LINES = {
    "half-open clients": [f"{SERVER}::TestBadClients::test_200_half_open_connections_do_not_hold_up_a_scrape"],
    "slow clients": [
        f"{SERVER}::TestBadClients::test_a_request_whose_bytes_trickle_is_cut_though_each_comes_in_time",
        f"{SERVER}::TestBadClients::test_idle_connections_lose_their_threads",
        f"{SERVER}::TestBadClients::test_readers_that_do_not_read_neither_block_scrapes_nor_other_pages",
        f"{CROWDS}::test_a_scrape_is_answered_while_200_clients_hang",
    ],
    "huge requests and answers": [
        f"{REQUESTS}::test_huge_heads_are_refused_before_they_are_held",
        f"{REQUESTS}::test_a_body_of_any_size_is_not_read",
        f"{CROWDS}::test_slow_readers_are_cut_when_their_answers_would_take_too_much_memory",
    ],
    "many clients": [
        f"{CROWDS}::test_a_scrape_is_answered_while_more_clients_hang_than_may_be_connected",
        f"{CROWDS}::TestWhoGoes::test_where_all_are_answered_the_oldest_so_that_the_number_stays_bounded",
        f"{SERVER}::TestBadClients::test_too_many_pages_at_once_are_told_to_come_back_and_scrapes_still_work",
        f"{CROWDS}::test_a_file_server_that_hangs_takes_neither_the_other_pages_nor_scrapes_along",
    ],
    "any bytes as a request": [f"{REQUESTS}::test_any_bytes_get_a_proper_answer_or_none", f"{REQUESTS}::test_a_header_that_comes_twice_is_refused"],
    "TLS handshake off the accept loop": [
        f"{TLS}::TestSilentClients::test_handshakes_that_never_come_hold_up_nobody",
        f"{TLS}::TestSilentClients::test_a_handshake_that_does_not_come_is_cut",
        f"{PROGRAMS}::test_prometheus_scrapes_with_its_certificate_while_200_clients_hang_in_the_handshake",
    ],
    "TLS 1.2 at least, never plain text": [
        f"{TLS}::TestPages::test_versions_before_1_2_are_refused",
        f"{TLS}::TestPages::test_plain_http_is_told_to_use_tls",
        f"{TLS}::TestSilentClients::test_a_connection_that_is_cut_never_goes_on_in_plain_text",
    ],
    "TLS mistakes are said at the start": [f"{TLS}::TestMistakes::test_each_names_the_file_and_what_to_do"],
    "client certificates": [
        f"{TLS}::TestClientCertificates::test_nobody_without_one_gets_an_answer",
        f"{TLS}::TestClientCertificates::test_with_a_token_as_well_pages_need_both_and_metrics_the_certificate",
        f"{PROGRAMS}::test_curl_reads_pages_with_certificate_and_token_and_nothing_without",
    ],
    "Basic and Bearer": [
        f"{SERVER}::TestWhoMayRead::test_the_token_opens_pages_as_bearer_and_as_password",
        f"{SERVER}::TestWhoMayRead::test_without_the_token_only_metrics_and_health_are_served",
    ],
    "constant time": [f"{CROWDS}::TestToken::test_it_is_compared_in_constant_time_and_only_so"],
    "the token is in no address and no log": [
        f"{CROWDS}::TestToken::test_it_is_not_taken_from_an_address",
        f"{REQUESTS}::test_nothing_is_written_anywhere_about_a_request",
        f"{CROWDS}::TestToken::test_who_comes_without_it_is_told_where_it_lies",
    ],
    "security headers on every answer": [
        f"{SERVER}::TestRequests::test_the_policy_allows_the_nonce_that_the_route_was_given",
        f"{REQUESTS}::test_any_bytes_get_a_proper_answer_or_none",
        f"{PROGRAMS}::test_chromium_runs_nothing_that_a_rank_has_written_even_where_escaping_failed",
    ],
    "Host check against DNS rebinding": [
        f"{SERVER}::TestWhoMayRead::test_a_site_that_points_its_name_at_us_is_refused",
        f"{CROWDS}::TestBeyondLoopback::test_another_name_reaches_no_page_and_is_asked_for_no_password",
        f"{PROGRAMS}::test_a_site_that_points_its_name_at_us_shows_chromium_no_page",
    ],
    "GET only": [f"{REQUESTS}::test_only_get_and_head_are_answered_on_every_path"],
    "path traversal": [
        f"{REQUESTS}::test_no_spelling_of_a_path_leaves_what_is_served",
        f"{REQUESTS}::test_a_link_that_somebody_laid_into_the_run_is_not_followed",
    ],
    "argv and environment are redacted": [
        f"{REDACT}::test_hidden_in_text",
        f"{REDACT}::test_environment_names_hide_their_values",
        f"{REDACT}::test_the_number_of_arguments_stays",
    ],
    "loopback unless a secret guards it": [f"{SERVER}::TestWhoMayRead::test_without_a_token_only_loopback_is_listened_on_and_said"],
    "a drawn token is 0600 and cannot be planted": [
        f"{USERS}::TestTokenFile::test_it_is_0600_whatever_the_umask_and_long_and_new_for_each_run",
        f"{USERS}::TestTokenFile::test_what_lies_in_its_place_is_neither_followed_nor_waited_for_nor_overwritten",
        f"{USERS}::TestTokenFile::test_a_launcher_that_is_faster_between_our_steps_wins_and_nothing_is_overwritten",
        f"{USERS}::TestTokenFile::test_another_users_file_is_not_used",
    ],
    "run directories 0700, slots and sockets private": [
        f"{USERS}::TestRunDirectory::test_it_is_0700_whatever_the_umask",
        f"{USERS}::TestSlots::test_directories_are_0700_and_slots_0600_whatever_the_umask",
        f"{USERS}::TestSlots::test_another_user_reaches_neither_slots_nor_sockets_and_can_plant_none",
    ],
    "links in shared temp": [
        f"{USERS}::TestRunDirectory::test_what_another_user_has_put_in_the_way_is_not_followed",
        f"{USERS}::TestRunDirectory::test_a_link_that_comes_between_the_look_and_the_making_is_not_used",
        f"{USERS}::TestSlots::test_a_link_in_place_of_our_directory_leads_nothing_of_ours_elsewhere",
    ],
    "another user's slots are never trusted": [
        f"{USERS}::TestSlots::test_a_directory_of_our_name_that_has_become_another_users_is_not_used_again",
        f"{USERS}::TestSlots::test_a_place_of_another_user_is_not_taken",
        f"{USERS}::TestSlots::test_the_sweep_removes_nothing_of_another_user_and_believes_none",
    ],
    "what ranks write is bounded and cannot crash the launcher": [
        f"{USERS}::TestSlots::test_the_sweep_outlives_anything_that_a_rank_has_written",
        f"{PAGES}::test_a_page_stays_bounded_when_every_text_is_as_long_as_a_slot_lets_it_be",
    ],
    "what ranks write cannot become markup, script or a series": [
        f"{PAGES}::test_no_page_runs_or_loads_what_a_rank_has_written",
        f"{PAGES}::test_written_pages_and_reports_of_an_incident_are_as_safe",
        f"{PAGES}::test_metrics_stay_well_formed_and_no_series_can_be_forged",
    ],
}


def names(path):
    """`test` and `Class::test` of a file."""
    for node in ast.parse((TESTS / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))


@pytest.mark.parametrize("line", LINES)
def test_each_line_has_its_tests(line):
    missing = [test for test in LINES[line] for path, _, name in [test.partition("::")] if name not in set(names(path))]
    assert not missing
