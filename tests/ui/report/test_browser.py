"""The report's page in a real Chromium: charts, tokens, keys, links, themes and telephones work as a reader expects.

`make test-browser` fetches the browser where it can.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from jackpot.ui.charts import Chart, Section, Series
from jackpot.ui.html import write_page
from ui.conftest import ODD, Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow
READABLE = 4.5  # the least contrast of text that WCAG 2 calls AA
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
FIELDS = {  # of the panel of a token: the column of the saved rollouts
    "rollout": "rollout_log_probs",
    "rescored": "rollout_model_log_probs",
    "old": "old_log_probs",
    "current": "log_probs",
    "acceptance": "acceptance",
    "z": "z",
    "weight": "weights",
    "kl": "kl_rollout_policy",
    "advantage": "advantages",
}


def saved_rows(run: Path, iteration: int = 4) -> list[dict[str, Any]]:
    return pq.read_table(run / "rollouts" / f"iteration-{iteration:06d}.parquet").to_pylist()


def show_tokens(page: Page, run: str = "") -> None:
    """Go to the tokens, of a run that is named or of the first one."""
    page.get_by_role("link", name="Tokens", exact=True).click()
    if run:
        page.get_by_label("Run", exact=True).select_option(label=run)
        page.wait_for_function("name => chosenRun().name === name && view.data && packs.size >= 4", arg=run)


def field(page: Page, name: str) -> str:
    """A text in the panel of the chosen token."""
    return page.locator(f'#detail [data-field="{name}"]').inner_text()


def chosen_token(page: Page) -> tuple[int, int]:
    """Response and position of the chosen token, as the address says: the page's own, as `page.url` follows later."""
    response, position = re.search(r"token=(\d+)\.(\d+)", page.evaluate("location.href")).groups()
    return int(response), int(position)


def first_rejected_token(rows: list[dict[str, Any]], after: tuple[int, int] = (-1, -1)) -> tuple[int, int]:
    """Response and position of the first rejected token that a model sampled, behind another token."""
    return min(
        (index, position)
        for index, row in enumerate(rows)
        for position, acceptance in enumerate(row["accept_mask"])
        if acceptance == 0 and row["sampled_mask"][position] and (index, position) > after
    )


def test_the_page_draws_what_comes_into_view(report: Path, open_page: Open) -> None:
    page = open_page(report)
    expect(page.get_by_role("heading", level=1)).to_contain_text("3 runs")
    runs = page.locator("figure", has_text="Accuracy on held-out problems")
    expect(runs.get_by_role("row")).to_have_count(4)
    expect(runs.get_by_role("cell", name="none-seed0")).to_be_visible()

    assert page.locator(".plot .main-svg").count() < 60  # the rest waits

    page.get_by_role("link", name="Rejection (OBRS)").click()
    chart = page.locator('figure[data-name="obrs/acceptance"]')
    expect(chart.locator(".scatterlayer .trace path.js-line")).to_have_count(2 + 1)  # two lines and a band

    bands = page.locator('figure[data-name="obrs/acceptance by position: obrs"]')
    expect(bands.locator(".legend")).to_contain_text("4-15")


def test_arms_can_be_switched_off_and_charts_found(report: Path, open_page: Open) -> None:
    page = open_page(report)
    page.get_by_role("button", name="none").click()
    page.get_by_role("link", name="Rejection (OBRS)").click()
    chart = page.locator('figure[data-name="obrs/acceptance"]')
    expect(chart.locator(".scatterlayer .trace")).to_have_count(2)

    page.get_by_label("Find a chart").fill("kappa")

    names = page.locator("#sections figure:visible figcaption").all_inner_texts()

    assert names == ["obrs/kappa", "obrs/kappa_z_above_1"]


def test_a_gap_is_a_gap_and_a_named_axis_has_names(tmp_path: Path, open_page: Open) -> None:
    gap = Series(name="a", x=[0, 1, 2, 3, 4], y=[1, 2, None, 2, 1], low=[0, 1, None, 1, 0], high=[2, 3, None, 3, 2])
    gap_chart = Chart(title="gap", x_label="x", y_label="y", series=(gap,))
    named_chart = Chart(
        title="h", x_label="x", y_label="y", x_names=("low", "high"), series=(Series(name="v", x=[0, 1], y=[1, 3]),)
    )
    write_page(tmp_path / "page.html", "t", [Section(title="s", intro="", items=(gap_chart, named_chart))])

    page = open_page(tmp_path / "page.html")
    page.wait_for_function("document.querySelectorAll('.main-svg .xtick').length > 2")
    fills, outlines = (
        page.evaluate(f"[...document.querySelectorAll('{kind}')].map((one) => one.getAttribute('d'))")
        for kind in ("path.js-fill", "path.js-line")
    )

    assert [path.count("M") for path in fills] == [2]
    assert len(outlines) == 5  # two polygons, two pieces of the line, the other line
    assert page.locator(".xtick:visible", has_text=re.compile("low|high")).count() == 2


def logarithmic_chart(title: str, *values: float) -> Chart:
    series = Series(name="a", x=list(range(len(values))), y=values)
    return Chart(title=title, x_label="x", y_label="", series=(series,), log_y=True)


def test_a_logarithmic_axis_within_a_decade_has_ticks(tmp_path: Path, open_page: Open) -> None:
    ranges = ((1.1e-7, 1.9e-7, 1.3e-7), (3.2, 3.4, 3.3), (0.5, 0.5, 0.5), (0.2, 4.0), (1e-6, 10.0))
    charts = tuple(logarithmic_chart(f"chart {index}", *values) for index, values in enumerate(ranges))
    write_page(tmp_path / "page.html", "t", [Section(title="s", intro="", items=charts)])

    page = open_page(tmp_path / "page.html")

    for index, values in enumerate(ranges):
        ticks = page.locator(f'figure[data-name="chart {index}"] .ytick text')
        expect(ticks.first).to_be_visible()
        fewest_labels = 2 if len(set(values)) > 1 else 1
        assert len([text for text in ticks.all_text_contents() if text]) >= fewest_labels, index


def test_a_folded_section_opens_and_a_vain_search_says_so(tmp_path: Path, open_page: Open) -> None:
    sections = [
        Section(title="s", intro="", items=(logarithmic_chart("chart", 0.2, 4.0),)),
        Section(title="more", intro="", items=(logarithmic_chart("folded", 1.0, 2.0),), is_folded=True),
    ]
    write_page(tmp_path / "page.html", "t", sections)
    page = open_page(tmp_path / "page.html")

    folded_chart = page.locator('figure[data-name="folded"]')
    expect(folded_chart).not_to_be_visible()
    page.get_by_role("link", name="more").click()
    expect(folded_chart.locator(".scatterlayer .trace")).to_have_count(1)

    page.get_by_label("Find a chart").fill("no such chart")
    script = "getComputedStyle(document.getElementById('sections'), '::before').content"
    assert "No chart" in page.evaluate(script)


def test_hovering_a_token_shows_the_numbers_of_the_file(report: Path, trained: Path, open_page: Open) -> None:
    page, rows = open_page(report), saved_rows(trained / "obrs-seed0")
    show_tokens(page, "obrs-seed0")
    tokens: list[Locator] = page.locator(".t").all()[:40]
    positions = [(index, position) for index, row in enumerate(rows) for position in range(len(row["tokens"]))]

    every_seventh = list(zip(tokens, positions, strict=False))[::7]
    for token, (index, position) in every_seventh:
        token.hover()
        row = rows[index]

        for name, column in FIELDS.items():
            assert float(field(page, name)) == float(f"{row[column][position]:.4g}"), name
        assert field(page, "id") == str(row["token_ids"][position])
        assert field(page, "position") == f"{position + 1} of {len(row['tokens'])}"
        assert field(page, "state") == ("accepted" if row["accept_mask"][position] else "rejected")
        versions = (int(field(page, "policy_version")), int(field(page, "rollout_model_version")))
        assert list(versions) == row["versions"][position]
        assert (field(page, "uid"), float(field(page, "reward"))) == (row["uid"], row["reward"])
        assert field(page, "correct") == ("right" if row["correct"] else "wrong")
        assert field(page, "answer") == row["answer"]

        top = page.locator('[data-field="top"]').inner_text()
        top_log_prob = max(row["rollout_top_log_probs"][position])
        assert page.locator('[data-field="top"] tr').count() >= 9
        assert "rollout model" in top
        assert f"{2.718281828459045**top_log_prob * 100:.3g} %" in top


def test_just_the_rejected_tokens_are_underlined(report: Path, trained: Path, open_page: Open) -> None:
    page, rows = open_page(report), saved_rows(trained / "obrs-seed0")
    show_tokens(page, "obrs-seed0")
    script = """[...document.querySelectorAll('.t')].map((one) => {
      const { color, boxShadow, textDecorationLine } = getComputedStyle(one);
      return [one.textContent, boxShadow === `${color} 0px -3px 0px 0px inset`, textDecorationLine];
    })"""

    styles = page.evaluate(script)

    saved_tokens = [
        (token, acceptance) for row in rows for token, acceptance in zip(row["tokens"], row["accept_mask"], strict=True)
    ]

    assert len(styles) > 60
    assert [text for text, _, _ in styles] == [token for token, _ in saved_tokens[: len(styles)]]

    underlines = [is_underlined for _, is_underlined, _ in styles]
    assert underlines == [acceptance == 0 for _, acceptance in saved_tokens[: len(styles)]]
    assert any(underlines)
    assert {decoration for _, _, decoration in styles} == {"none"}  # nothing crosses the letters


def test_filters_leave_what_they_say(report: Path, trained: Path, open_page: Open) -> None:
    page, rows = open_page(report), saved_rows(trained / "obrs-seed0")
    show_tokens(page, "obrs-seed0")
    count = page.locator("#count")

    def expected_count(matches: Any) -> str:
        return f"{sum(map(matches, rows))} of {len(rows)} responses match"

    expect(count).to_contain_text(expected_count(lambda row: True))

    page.get_by_label("Right or wrong").select_option("wrong")
    expect(count).to_contain_text(expected_count(lambda row: not row["correct"]))
    page.get_by_label("Right or wrong").select_option("all")

    page.get_by_label("Least reward").fill("0.5")
    expect(count).to_contain_text(expected_count(lambda row: row["reward"] >= 0.5))
    page.get_by_label("Least reward").fill("")

    page.get_by_label("Rejected tokens").select_option("at least one")
    expect(count).to_contain_text(expected_count(lambda row: 0 in row["accept_mask"]))

    page.get_by_label("Rejected tokens").select_option("above 10 %")
    expect(count).to_contain_text(expected_count(lambda row: row["accept_mask"].count(0) / len(row["tokens"]) > 0.1))
    page.get_by_label("Rejected tokens").select_option("any number")

    prompt = rows[5]["prompt"]
    page.get_by_label("Text in prompt or response").fill(prompt)
    expect(count).to_contain_text(expected_count(lambda row: prompt in row["prompt"] + "\n" + "".join(row["tokens"])))

    page.get_by_label("Text in prompt or response").fill("no such text")
    expect(count).to_contain_text(f"0 of {len(rows)} responses")

    assert page.locator(".t").count() == 0

    page.get_by_label("Text in prompt or response").fill("")
    page.get_by_label("Order").select_option("most rejected")
    shares = [row["accept_mask"].count(0) / len(row["tokens"]) for row in rows]
    order = page.evaluate("view.order")

    assert sorted(order) == list(range(len(rows)))
    assert all(shares[first] >= shares[second] for first, second in pairwise(order))


def test_the_keyboard_does_it_all(report: Path, trained: Path, open_page: Open) -> None:
    page, rows = open_page(report), saved_rows(trained / "obrs-seed0")
    show_tokens(page, "obrs-seed0")
    page.locator("#list").focus()
    page.keyboard.press("j")

    assert chosen_token(page) == (0, 0)

    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")

    assert chosen_token(page) == (0, 2)
    assert field(page, "position").startswith("3 of")

    expect(page.locator('[aria-selected="true"]')).to_have_count(1)
    selected_id = page.locator('[aria-selected="true"]').get_attribute("id")
    assert page.locator("#list").get_attribute("aria-activedescendant") == selected_id

    page.keyboard.press("ArrowDown")
    assert chosen_token(page) == (1, 0)

    page.keyboard.press("ArrowLeft")
    assert chosen_token(page) == (0, len(rows[0]["tokens"]) - 1)

    page.keyboard.press("Home")
    first_token = first_rejected_token(rows)

    if first_token != (0, 0):
        page.keyboard.press("n")
        assert chosen_token(page) == first_token
        assert field(page, "state") == "rejected"

    page.keyboard.press("n")
    assert chosen_token(page) == first_rejected_token(rows, after=first_token)

    page.keyboard.press("Shift+N")
    assert chosen_token(page) == first_token

    page.keyboard.press("End")
    assert chosen_token(page) == (len(rows) - 1, 0)

    expect(page.locator('[aria-selected="true"]')).to_be_in_viewport()

    for key, name in enumerate(("Acceptance", "Weight", "Ratio", "Advantage", "KL"), start=1):
        page.keyboard.press(str(key))
        expect(page.get_by_role("radio", name=name)).to_have_attribute("aria-checked", "true")

    page.keyboard.press("/")
    page.keyboard.type("j?n")  # letters are text here
    expect(page.get_by_label("Text in prompt or response")).to_have_value("j?n")
    page.keyboard.press("Escape")

    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_a_link_brings_back_what_was_chosen(report: Path, open_page: Open) -> None:
    page = open_page(report)
    show_tokens(page, "obrs-seed1")

    iterations = page.get_by_label("Saved iteration")
    first_iteration = iterations.locator("option").nth(0).inner_text()
    iterations.select_option(label=first_iteration)
    page.get_by_role("radio", name="Ratio").click()
    page.get_by_label("Right or wrong").select_option("wrong")
    page.locator(".t").nth(3).click()

    state, text = page.evaluate("location.hash"), page.locator("#detail").inner_text()
    linked_page = open_page(report, state=state)

    expect(linked_page.get_by_label("Run", exact=True).locator("option:checked")).to_have_text("obrs-seed1")
    expect(linked_page.get_by_label("Saved iteration").locator("option:checked")).to_have_text(first_iteration)
    expect(linked_page.get_by_role("radio", name="Ratio")).to_have_attribute("aria-checked", "true")
    expect(linked_page.get_by_label("Right or wrong")).to_have_value("wrong")
    expect(linked_page.locator('[aria-selected="true"]')).to_have_count(1)

    assert linked_page.locator("#detail").inner_text() == text


def test_tokens_cannot_be_markup_and_blanks_are_seen(odd_report: Path, open_page: Open) -> None:
    page = open_page(odd_report)
    show_tokens(page)
    for _ in range(len(ODD)):
        page.keyboard.press("j")
        page.locator("#list").focus()
        page.keyboard.press("ArrowRight")

    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("#tokens :is(img, script, b)").count() == 0

    texts = page.locator(".t").all_inner_texts()
    assert texts[:6] == ["</script>", "<img src=x onerror=hacked=1>", "⏎", "··", " the", "é"]
    assert {"&amp;", "中文", "∅", "␇"} <= set(texts)

    tools = page.locator(".t.tool")
    expect(tools).to_have_count(2)
    tools.first.hover()

    assert "tool" in field(page, "state")


def contrast(first: list[float], second: list[float]) -> float:
    """As WCAG 2 defines it, of two sRGB colors from 0 to 255."""

    def luminance(color: list[float]) -> float:
        shares = [channel / 255 for channel in color]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def color_of(page: Page, script: str) -> list[float]:
    """Red, green and blue, of 255, of what a script gives."""
    return [float(channel) for channel in re.findall(r"[\d.]+", page.evaluate(script))[:3]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_readable_in_light_and_dark(report: Path, open_page: Open, dark: bool) -> None:
    page = open_page(report, dark=dark)
    show_tokens(page, "obrs-seed0")
    theme = "dark" if dark else "light"
    script = "theme => Array.from({length: 201}, (_, i) => colorAt(i / 100 - 1, theme)).map((one) => [one, inkOn(one)])"

    for back, ink in page.evaluate(script, theme):
        front = [int(ink[start : start + 2], 16) for start in (1, 3, 5)]
        assert contrast(back, front) >= READABLE

    for name in ("acceptance", "weight", "ratio", "advantage", "kl"):
        page.locator(f"[data-coloring={name}]").click()
        for tokens in (".t", ".t.rejected"):
            styles = f"[...document.querySelectorAll('{tokens}')].map((one) => getComputedStyle(one))"
            pairs = page.evaluate(f"{styles}.map((one) => [one.backgroundColor, one.color])")[:50]
            assert pairs
            for pair in pairs:
                back, front = ([float(channel) for channel in re.findall(r"[\d.]+", text)[:3]] for text in pair)
                assert contrast(back, front) >= READABLE

    card = color_of(page, "getComputedStyle(document.querySelector('figure')).backgroundColor")
    assert (sum(card) < 150) == dark

    for selector in (".note", ".intro", "td", "th", ".unhealthy", "nav a", ".row.head", ".row .wrong"):
        if page.locator(selector).count():
            ink = color_of(page, f"getComputedStyle(document.querySelector('{selector}')).color")
            assert contrast(card, ink) >= READABLE, selector


def test_a_hundred_thousand_tokens_stay_fluid(huge_report: Path, open_page: Open) -> None:
    page = open_page(huge_report)
    show_tokens(page)
    expect(page.locator("#count")).to_contain_text("100,000 of 100,000 tokens")

    measurement = page.evaluate(
        """async () => {
          const list = document.getElementById("list"), frame = () => new Promise(requestAnimationFrame);
          const most = list.scrollHeight - list.clientHeight, gaps = [];
          let nodes = 0, seen = new Set(), last = performance.now();
          for (let step = 0; step <= 300; step++) {
            list.scrollTop = most * step / 300;
            await frame(); await frame();
            gaps.push(performance.now() - last); last = performance.now();
            const tokens = list.querySelectorAll(".t");
            nodes = Math.max(nodes, list.querySelectorAll("*").length);
            const box = list.getBoundingClientRect();
            const middle = document.elementFromPoint(box.left + 30, box.top + box.height / 2);
            if (!list.contains(middle)) throw new Error("nothing in the middle");
            seen.add(tokens[0].dataset.k).add(tokens[tokens.length - 1].dataset.k);
          }
          let touched = 0;
          const count = new MutationObserver((records) => { touched += records.length; });
          count.observe(list, { subtree: true, attributes: true });
          const begun = performance.now();
          colorBy("ratio");
          const switched = performance.now() - begun;
          await frame();
          return { nodes, touched, tokens: list.querySelectorAll(".t").length, seen: [...seen].map(Number), switched,
            gaps: gaps.slice(1).sort((a, b) => a - b) };
        }"""
    )

    gaps = measurement["gaps"]
    print(
        f"two frames: median {gaps[150]:.0f} ms, worst {gaps[-1]:.0f} ms; {measurement['nodes']} nodes at most; ",
        end="",
    )
    print(f"colors switched in {measurement['switched']:.1f} ms, {measurement['touched']} changes")

    assert 0 in measurement["seen"]
    assert 99_999 in measurement["seen"]
    assert measurement["nodes"] < 4000  # 100,000 tokens in 11,000 rows; what is in view and a little more has elements
    assert 0 < measurement["touched"] <= 2 * measurement["tokens"]

    page.locator("#list").focus()
    page.keyboard.press("End")

    assert chosen_token(page) == (39, 0)

    expect(page.locator('[aria-selected="true"]')).to_be_in_viewport()


@pytest.mark.parametrize("width", [360, 1100])
def test_a_narrow_window_has_no_sideways_scrolling(report: Path, open_page: Open, width: int) -> None:
    page = open_page(report, width=width, height=700)
    show_tokens(page)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width


CUT = """(place) => [...document.querySelectorAll(place)].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && (one.scrollWidth > one.clientWidth || box.left < 0 || box.right > innerWidth);
}).map((one) => one.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("name", ["report", "odd_report", "sick_report", "comparison_page"])
def test_a_telephone_cuts_nothing(request: pytest.FixtureRequest, open_page: Open, name: str) -> None:
    page = open_page(request.getfixturevalue(name), touch=True, width=390, height=844)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")

    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert page.evaluate(CUT, ".scroll, figcaption, h1, h2, nav a, #coloring button, .controls label, .row.head") == []


def test_a_table_keeps_its_rows_on_a_telephone(report: Path, open_page: Open) -> None:
    page = open_page(report, touch=True, width=390, height=844)
    runs = page.locator("figure", has_text="Accuracy on held-out problems")
    cell = runs.get_by_role("row").nth(1).get_by_role("cell").nth(4)

    assert cell.evaluate("one => getComputedStyle(one, '::before').content") == '"policy before"'
    assert cell.inner_text().endswith("%")


def test_a_tapped_token_has_its_panel_on_the_screen(report: Path, trained: Path, open_page: Open) -> None:
    page = open_page(report, touch=True, width=390, height=844)
    show_tokens(page, "obrs-seed0")
    page.get_by_label("Order").select_option("most rejected")
    page.evaluate("scrollBy(0, document.querySelector('.inspector').getBoundingClientRect().top - innerHeight + 300)")
    expect(page.locator("#detail")).not_to_be_in_viewport()

    token = page.locator(".t.rejected").first
    token.tap()

    expect(page.locator("#detail .state")).to_have_text("rejected")
    expect(page.locator("#detail")).to_be_in_viewport(ratio=0.98)
    expect(token).to_be_in_viewport(ratio=0.98)


def test_the_probabilities_of_a_token_have_one_unit(report: Path, open_page: Open) -> None:
    page = open_page(report)
    texts = page.evaluate("[1, 0.5, 0.0123, 1e-5, 3e-12, 0].map(percent)")
    assert texts == ["100 %", "50 %", "1.23 %", "0.001 %", "3e-10 %", "0 %"]


@pytest.mark.parametrize("name", ["report", "odd_report", "sick_report", "long_report", "comparison_page"])
def test_axe_finds_nothing_serious(request: pytest.FixtureRequest, open_page: Open, axe: str, name: str) -> None:
    """In both themes and on a telephone, with every section open and a token chosen."""
    for look in ({}, {"dark": True}, {"touch": True, "width": 390, "height": 844}):
        page = open_page(request.getfixturevalue(name), **look)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        if page.locator("#tokens").count():
            page.locator(".t").first.click()

        page.evaluate(axe)
        result = page.evaluate("axe.run(document)")

        assert len(result["passes"]) > 15  # it looked
        violations = [violation for violation in result["violations"] if violation["impact"] in ("serious", "critical")]
        assert [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in violations] == []


def test_a_run_of_5000_iterations_opens_at_once(long_report: Path, open_page: Open) -> None:
    """It draws what is in view, thinned. Seconds are in docs/compare.md; here is what a busy machine cannot change."""
    page = open_page(long_report)
    page.wait_for_function("document.querySelectorAll('.plot .scatterlayer').length >= 3")
    print(f"its first charts are there after {page.evaluate('performance.now()') / 1000:.1f} s")
    plots = "[...document.querySelectorAll('.plot')].filter((one) => one.drawn)"
    point_counts = page.evaluate(f"{plots}.map((one) => one.data.map((trace) => trace.x.length))")

    assert 3 <= len(point_counts) <= 12
    assert len(page.locator(".plot").all()) > 60

    points = [count for chart in point_counts for count in chart]
    assert max(points) > 600
    assert max(points) <= 800
    assert page.evaluate("document.querySelectorAll('*').length") < 4000
    assert long_report.stat().st_size < 3_000_000


def test_an_old_browser_is_told_so(sick_report: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(sick_report.as_uri())
    expect(page.locator("main .failed")).to_contain_text("too old for the page")
    page.close()
