"""The cost benchmark itself, on a tiny policy: every offer is timed, and what it claims about bits holds here."""

from __future__ import annotations

from rtc_cost import OFFERS, main


def test_every_offer_is_timed_and_rows_without_guidance_do_not_change() -> None:
    arguments = ["--model", "tiny", "--device", "cpu", "--batches", "2", "--n", "5"]
    rows = main(arguments)["rows"]
    assert [tuple(row["offers"]) for row in rows] == list(OFFERS)
    for row in rows:
        assert row["unguided_rows_equal_plain_bit_for_bit"]
        assert row["batch_2"]["route_ms_p50"] > 0
        if row["offers"]:
            assert row["mixed_batch_against_row_by_row"] < 1e-4
            assert row["guidance_moves_actions_by"] > 0.1
