"""The pictures of report pages, from runs that are there: python benchmarks/report_pictures.py RUN ...

The browser is Debian's chromium, or --chromium PATH.

Those of docs/compare.md, of the runs of docs/tutorial.md: python benchmarks/report_pictures.py runs/compare-quickstart
That of docs/smollm.md: python benchmarks/report_pictures.py runs/smollm-obrs-seed1 --tokens smollm-tokens
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from jackpot.ui.report.report import write_report

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--tokens", metavar="NAME", help="take the inspector's picture alone, under this name")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = write_report(arguments.runs, Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 780})
        page.goto(report.path.as_uri())
        if not arguments.tokens:
            mismatch = page.get_by_role("link", name="Mismatch, before the correction")
            section = mismatch.get_attribute("href")
            mismatch.click()
            page.wait_for_function(f"document.querySelectorAll('{section} .main-svg').length > 8")
            page.screenshot(path=PICTURES / "report-curves.png")

        page.get_by_role("link", name="Tokens", exact=True).click()
        run = page.locator("#run option", has_text="obrs").first.inner_text()
        page.get_by_label("Run", exact=True).select_option(label=run)
        page.get_by_label("Rejected tokens").select_option("above 10 %")
        page.get_by_role("radio", name="Ratio").click()
        page.locator("#list").focus()
        for _ in range(20):  # to the first token that the policy would hardly have written
            page.keyboard.press("n")
            page.wait_for_selector("#detail .state.rejected")
            if float(page.locator("#detail tr", has_text="acceptance").locator("td, th").last.inner_text()) < 0.2:
                break
        page.screenshot(path=PICTURES / f"{arguments.tokens or 'report-tokens'}.png")
        browser.close()


if __name__ == "__main__":
    main()
