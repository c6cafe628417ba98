"""The page: its numbers are those of the reports, nothing in it runs or hides, and people can use it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

import page_views as views

from rlk_audit.config import AuditConfig
from rlk_audit.page import page_html, write_page
from rlk_audit.page.axes import LogScale
from rlk_audit.page.distribution import SignedAxis, survival, tail_chart
from rlk_audit.page.step_lines import POINTS, thinned
from rlk_audit.page.text import quantile_share, visible
from rlk_audit.page.totals import outcome, quantile_keys, worst_tokens
from rlk_audit.run_view import RunView

PLOTLY_BYTES = 5_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def faulty() -> RunView:
    return views.recorded_view([views.HEALTHY] * 3 + [views.STALE_ENGINE] * 2, "Run with a stale engine")


@pytest.fixture(scope="module")
def healthy() -> RunView:
    return views.recorded_view([views.HEALTHY] * 3)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()


class Opened:
    """A page in the browser, with everything that it said, asked for or tried."""

    def __init__(self, browser: Any, view: RunView, folder: Path, **options: Any) -> None:
        path = folder / "page.html"
        self.size = write_page(view, path)
        self.tab = browser.new_page(reduced_motion="reduce", **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())

    def draw_all(self) -> None:
        for chart in self.tab.locator(".chart").all():
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for()


def specs(html: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return [json.loads(text, parse_constant=pytest.fail) for text in found]


def without_plotly(html: str) -> str:
    return re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)


# --- numbers --------------------------------------------------------------------------------------------------------


def headline_values(html: str) -> dict[str, str]:
    block = re.search(r'<dl class="headlines">(.*?)</dl>', html, re.DOTALL)[1]
    return dict(re.findall(r'<a href="#def-\w+">([^<]+)</a></dt><dd><data value="([^"]+)"', block))


def test_the_headline_is_that_of_the_total(faulty: RunView) -> None:
    shown = headline_values(page_html(faulty))
    metrics = faulty.total.metrics
    keys = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p99_9", "max": "max"}
    assert {name: float(shown[name]) for name in keys} == {n: metrics[f"abs_dlogp_{key}"] for n, key in keys.items()}
    assert int(shown["compared tokens"]) == metrics["compared_token_count"]
    assert float(shown["effective sample size"]) == metrics["ess0"]


def test_lines_and_table_hold_every_step(faulty: RunView) -> None:
    html = page_html(faulty)
    lines = {trace["name"]: trace for trace in specs(html)[0]["data"]}
    assert lines["p99"]["x"] == [1, 2, 3, 4, 5]
    assert lines["p99"]["y"] == [report.metrics["abs_dlogp_p99"] for report in faulty.steps]
    failed = [report.step for report in faulty.steps if not report.verdict.passed]
    assert failed == [4, 5] == lines["limit crossed"]["x"]
    assert all("abs_dlogp_p99 is" in text for text in lines["limit crossed"]["text"])
    for report in faulty.steps:
        assert f'<data value="{report.metrics["abs_dlogp_max"]}">' in html


def test_breakdowns_and_worst_tokens_are_those_of_the_reports(faulty: RunView) -> None:
    html = page_html(faulty)
    chart = next(
        spec for spec in specs(html) if spec["layout"].get("yaxis", {}).get("ticktext") == ["0", "1", "2", "3"]
    )
    traces = {trace.get("name"): trace for trace in chart["data"]}
    buckets = [bucket for bucket in faulty.total.breakdowns["engine"] if bucket.compared_token_count]
    assert traces["mean"]["x"] == [bucket.abs_dlogp_mean for bucket in buckets]
    assert traces["tokens"]["x"] == [bucket.compared_token_count for bucket in buckets]
    assert worst_tokens(faulty, 1)[0][1].abs_dlogp == faulty.total.metrics["abs_dlogp_max"]
    assert "stale_weights" in html and faulty.causes[-1].findings[0].summary in html


def test_the_tail_counts_the_tokens_of_the_histogram(faulty: RunView) -> None:
    histogram = faulty.total.histogram()
    magnitudes, beyond = survival(histogram)
    assert beyond[0] == sum(histogram.counts) == faulty.total.metrics["compared_token_count"]
    assert magnitudes == sorted(magnitudes) and beyond == sorted(beyond, reverse=True)
    edge = next(i for i, size in enumerate(magnitudes) if size == 0.25)
    by_hand = sum(
        n
        for low, high, n in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
        if low >= 0.25 or high <= -0.25
    )
    assert beyond[edge] == by_hand > 0


def test_quantiles_stand_at_their_shares() -> None:
    """The highest quantile is the largest value itself, which no share of a logarithmic axis is beyond."""
    config = AuditConfig(quantiles=("0", "0.05", "0.5", "0.999", "1"))
    report = views.small_report(1, 0.5, config)
    assert [quantile_share(key) for key in quantile_keys(report.metrics)] == [0.0, 0.05, 0.5, 0.999, 1.0]
    chart = tail_chart(report.histogram(), report.metrics)
    (shown,) = (trace for trace in chart.data if trace["name"] == "quantiles")
    marks = dict(zip(shown["text"], shown["y"], strict=True))
    assert marks == pytest.approx({"p00": 1.0, "p05": 0.95, "p50": 0.5, "p99.9": 0.001})


def test_the_signed_axis_is_monotone(faulty: RunView) -> None:
    histogram = faulty.total.histogram()
    places = [SignedAxis(histogram).place(edge) for edge in histogram.edges]
    assert places == sorted(places) and len(set(places)) == len(places)


def test_the_density_has_train_upwards(faulty: RunView) -> None:
    heat = next(spec["data"][0] for spec in specs(page_html(faulty)) if spec["data"][0]["type"] == "heatmap")
    rollout, train = 3, 40
    counts = faulty.density.counts * 0
    counts[rollout, train] = 100
    one = page_html(replace(faulty, density=replace(faulty.density, counts=counts)))
    heat = next(spec["data"][0] for spec in specs(one) if spec["data"][0]["type"] == "heatmap")
    assert heat["z"][train][rollout] == 2.0
    assert sum(z is not None for row in heat["z"] for z in row) == 1


def test_zero_stands_at_the_edge_and_nan_leaves_a_gap() -> None:
    scale = LogScale.of([0.0, 0.02, math.nan, 5.0])
    assert (scale.low, scale.high, scale.has_zero) == (0.001, 10.0, True)
    assert scale.places([0.0, 0.02, math.nan]) == [0.001, 0.02, None]


@pytest.mark.parametrize("values", [[5e-324], [1.7e308, 0.0], [5e-324, 1.0, 1.7e308]])
def test_a_logarithmic_axis_takes_any_magnitude(values: list[float]) -> None:
    axis = LogScale.of(values).axis("nats")
    assert len(axis["tickvals"]) == len(axis["ticktext"]) >= 2
    assert all(0 < value < math.inf for value in axis["tickvals"]) and axis["range"][0] < axis["range"][1]


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_the_verdict_in_words(faulty: RunView, healthy: RunView) -> None:
    assert outcome(faulty).state == "bad" and "2 of 5 judged reports" in outcome(faulty).detail
    assert outcome(healthy).state == "ok"
    assert outcome(RunView("x", (views.small_report(1, 0.1),))).state == "unjudged"
    assert outcome(RunView("x", (views.empty_report(1),))).state == "empty"
    assert outcome(RunView("x", ())).state == "empty"


@pytest.mark.parametrize(
    "view",
    [
        RunView("no steps", ()),
        RunView("empty steps", (views.empty_report(1), views.empty_report(2)), views.empty_report(None)),
        RunView("one step", (views.small_report(3, 0.4),)),
        RunView(
            "unknown steps", (views.small_report(None, 0.4), views.empty_report(None), views.small_report(None, 0))
        ),
        RunView("equal", (views.small_report(1, 0.0),), problems=("a line could not be read",)),
    ],
    ids=lambda view: view.title,
)
def test_little_or_nothing_makes_a_page(view: RunView, chromium: Any, tmp_path: Path) -> None:
    opened = Opened(chromium, view, tmp_path)
    opened.draw_all()
    text = opened.tab.inner_text("body")
    assert opened.complaints == []
    assert re.search(r"\b(NaN|nan|None|null|undefined)\b", text) is None
    assert all(problem in text for problem in view.problems)
    assert ("Nothing compared" in text) == (outcome(view).state == "empty")


def test_reports_read_back_say_what_they_lack(faulty: RunView) -> None:
    steps = tuple(type(report).from_dict(report.to_dict()) for report in faulty.steps)
    html = page_html(RunView("log", steps))
    assert "read back from JSON" in html
    assert float(headline_values(html)["mean"]) == pytest.approx(faulty.total.metrics["abs_dlogp_mean"], rel=1e-6)
    assert float(headline_values(html)["max"]) == faulty.total.metrics["abs_dlogp_max"]
    assert "largest of a step" in html


# --- many steps -----------------------------------------------------------------------------------------------------


def test_thinning_keeps_extremes_and_gaps_of_every_group() -> None:
    values = [1.0 + (i % 13) / 100 for i in range(10_000)]
    values[3333], values[7777], values[9999], values[5000] = 50.0, 0.001, 9.0, math.nan
    kept = thinned(values)
    assert {3333, 7777, 9999, 5000} <= set(kept) and kept == sorted(kept) and len(kept) <= 1.5 * POINTS
    assert thinned(values[:POINTS]) == list(range(POINTS))


def test_ten_thousand_steps(chromium: Any, tmp_path: Path) -> None:
    spikes = {1234: 7.5, 9999: 6.25}
    view = views.long_view(10_000, spikes, gaps=(5000,))
    opened = Opened(chromium, view, tmp_path)
    assert opened.size < PLOTLY_BYTES + 1_500_000
    opened.draw_all()
    assert opened.complaints == []
    lines = {trace["name"]: trace for trace in specs((tmp_path / "page.html").read_text())[0]["data"]}
    drawn = dict(zip(lines["max"]["x"], lines["max"]["y"], strict=True))
    for step, drift in spikes.items():
        assert drawn[step] == pytest.approx(drift)
    assert drawn[5000] is None
    assert "no spike is left out" in opened.tab.inner_text("#summary-steps")


# --- hostile texts --------------------------------------------------------------------------------------------------


def test_hidden_characters_are_made_visible() -> None:
    assert visible("a\x00\n\t\x7f\u202e\u2028\ud800é 漢") == "a␀↵⇥␡⟨U+202E⟩⟨U+2028⟩⟨U+D800⟩é 漢"


def test_hostile_texts_are_texts(faulty: RunView, chromium: Any, tmp_path: Path) -> None:
    opened = Opened(chromium, views.hostile_view(faulty), tmp_path)
    opened.draw_all()
    opened.tab.locator(".chart").first.hover()
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in opened.requests if url.startswith("file:")]) == 1
    assert opened.tab.inner_text("h1") == views.HOSTILE[0]
    assert opened.tab.locator("img, iframe, object, embed, [onmouseover], [onerror]").count() == 0
    links = opened.tab.evaluate(
        "[...document.querySelectorAll('a')].map(a => a.getAttribute('href') ?? a.href.baseVal)"
    )
    assert links and all(link.startswith("#") for link in links)
    labels = opened.tab.locator(".chart .ytick text").all_text_contents()
    assert views.HOSTILE[-1] in labels
    assert any(label.startswith("<script>alert(") for label in labels)
    assert any(label.startswith("<a href='javascri") for label in labels)
    raw = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not set("\u202e\u2028\u2029\x00\x1b\u200b") & set(without_plotly(raw))
    assert "{{ 7 * 7 }}" in without_plotly(raw).replace("&#34;", '"')


def test_the_policy_stops_what_is_not_the_pages_own(healthy: RunView, chromium: Any, tmp_path: Path) -> None:
    opened = Opened(chromium, healthy, tmp_path)
    policy = opened.tab.get_attribute('meta[http-equiv="Content-Security-Policy"]', "content")
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    assert "unsafe-inline" not in re.search(r"script-src[^;]*", policy)[0]
    opened.tab.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "https://example.com/x.png";
            document.body.append(image);
            image.insertAdjacentHTML("afterend", "<b onclick='window.ran = true' id=bold>x</b>");
            document.getElementById("bold").click();
        }"""
    )
    opened.tab.wait_for_timeout(200)
    assert opened.tab.evaluate("window.ran") is None
    assert sum("Content Security Policy" in text for text in opened.complaints) >= 3


# --- people ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_it_fits_and_charts_follow_the_colours(
    faulty: RunView, chromium: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    opened = Opened(chromium, faulty, tmp_path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened.draw_all()
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = opened.tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (brightness(ink) > brightness(paper)) == (scheme == "dark")
    tick = opened.tab.locator(".chart .xtick text").first
    assert tick.evaluate("it => getComputedStyle(it).fill") == ink
    opened.tab.click("#theme")
    other = opened.tab.evaluate("getComputedStyle(document.body).color")
    assert other != ink
    opened.tab.wait_for_function(
        "c => getComputedStyle(document.querySelector('.chart .xtick text')).fill === c", arg=other
    )
    assert opened.complaints == []


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_keyboard_reaches_what_can_be_used(healthy: RunView, chromium: Any, tmp_path: Path) -> None:
    tab = Opened(chromium, healthy, tmp_path, color_scheme="light").tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"
    tab.reload()
    for _ in range(2):
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "theme"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Space")
    assert tab.get_attribute("#theme", "aria-pressed") == "true"
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"


def test_structure_for_screen_readers(faulty: RunView, chromium: Any, tmp_path: Path) -> None:
    opened = Opened(chromium, faulty, tmp_path)
    opened.draw_all()
    tab = opened.tab
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert tab.locator("main").count() == tab.locator("header").count() == tab.locator("nav").count() == 1
    for chart in tab.locator(".chart").all():
        assert chart.get_attribute("aria-label")
        assert tab.inner_text(f"#{chart.get_attribute('aria-describedby')}")
    assert tab.locator("figure").count() == tab.locator("figure table").count()
    assert tab.locator("table").count() == tab.locator("table caption").count()
    assert tab.locator("th:not([scope])").count() == 0
    ids = tab.evaluate("[...document.querySelectorAll('main [id]')].filter(e => !e.closest('svg')).map(e => e.id)")
    assert len(ids) == len(set(ids))
    targets = tab.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href').slice(1))")
    assert all(tab.evaluate("id => !!document.getElementById(id)", target) for target in targets)


def test_excerpts_show_numbers_beside_colours_and_positions_where_texts_are_unknown(faulty: RunView) -> None:
    excerpt = max(faulty.excerpts, key=lambda it: it.worst.abs_dlogp)
    html = page_html(replace(faulty, excerpts=(replace(excerpt, texts=()),)))
    place = excerpt.positions.index(excerpt.worst.token_position)
    dlogp = excerpt.train_logp[place] - excerpt.rollout_logp[place]
    assert f'down-4 worst" title="position {excerpt.worst.token_position}: ' in html
    assert f"#{excerpt.worst.token_position}</span> <small>{dlogp:+.2f}</small>" in html


def test_charts_are_drawn_when_they_come_into_view(faulty: RunView, chromium: Any, tmp_path: Path) -> None:
    tab = Opened(chromium, faulty, tmp_path, viewport={"width": 1280, "height": 600}).tab
    tab.wait_for_timeout(300)
    last = tab.locator(".chart").last
    assert last.locator("svg").count() == 0
    last.scroll_into_view_if_needed()
    last.locator(".main-svg").first.wait_for()


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_file_is_there_whole_or_not_at_all(
    healthy: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    size = write_page(healthy, path)
    assert size == path.stat().st_size < PLOTLY_BYTES + 500_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    before = path.read_bytes()

    def fail(*names: Any) -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        write_page(healthy, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named_with_its_extra(
    healthy: RunView, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'rlk_audit\[report\]'"):
        page_html(healthy)


def test_importing_it_imports_neither_package() -> None:
    script = "import sys, rlk_audit.page; print([name for name in ('jinja2', 'plotly') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n"
