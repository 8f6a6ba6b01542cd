"""Where the pages of the report and of the comparison go."""

from __future__ import annotations

from pipeline.report.config import parse_comparison, parse_report

BUCKET = "s3://bucket/out?region=eu-central-1"


def test_pages_lie_in_the_output_whatever_its_address() -> None:
    assert parse_report([BUCKET]).page_uri == "s3://bucket/out/report.html?region=eu-central-1"
    assert parse_comparison(["out", BUCKET]).page_uri == "s3://bucket/out/comparison.html?region=eu-central-1"
    assert parse_report([BUCKET, "--page", "page.html"]).page_uri == "page.html"
