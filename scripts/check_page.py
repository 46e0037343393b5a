"""The chat page in a headless Chromium: ask, stream, stop, reload, at two widths in two colours.

    pip install playwright; apt-get install chromium
    python scripts/check_page.py http://127.0.0.1:8000 FOLDER

Writes screenshots into FOLDER to look at, and fails if the page does not do what it should, logs
an error, asks for anything from elsewhere, or is wider than the screen.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
PATIENCE = 120_000  # milliseconds for an answer


def check(page: Page, name: str, folder: Path, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#model:not(:empty)")
    page.screenshot(path=folder / f"{name}-empty.png")
    page.locator(".settings summary").click()
    page.fill("#max-tokens", "48")
    page.fill("#temperature", "0")
    page.locator(".settings summary").click()
    page.fill("#prompt", "When is the library open on Saturday?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer.streaming")
    assert page.is_visible("#stop") and not page.is_visible("#send")
    page.screenshot(path=folder / f"{name}-streaming.png")
    page.wait_for_selector(".card dl", timeout=PATIENCE)
    figures = page.locator(".card dd").all_inner_texts()
    assert len(figures) == 4 and "–" not in figures, figures
    page.fill("#prompt", "And what does a lost card cost? Answer at length.")
    page.locator(".settings summary").click()
    page.fill("#max-tokens", "400")
    page.locator(".settings summary").click()
    page.focus("#prompt")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer.streaming")
    page.click("#stop")
    page.wait_for_selector(".error")
    assert page.inner_text(".error") == "Stopped."
    page.screenshot(path=folder / f"{name}-stopped.png")
    before = page.locator(".answer").all_inner_texts()
    page.reload()
    page.wait_for_selector(".turn")
    assert page.locator(".answer").all_inner_texts() == before, "a reload keeps the talk"
    assert fits(page), "too wide"
    page.goto(f"{url}/docs")
    page.wait_for_selector(".reference table")
    page.screenshot(path=folder / f"{name}-docs.png")
    assert fits(page), "too wide"


def fits(page: Page) -> bool:
    """Past the page's own Content-Security-Policy, which forbids evaluating text."""
    expression = "document.documentElement.scrollWidth <= innerWidth"
    session = page.context.new_cdp_session(page)
    return bool(session.send("Runtime.evaluate", {"expression": expression})["result"]["value"])


def watch(page: Page, url: str) -> list[str]:
    """What goes wrong in the page from now on."""
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(r.url))
    return wrong


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                page = context.new_page()
                wrong = watch(page, url)
                check(page, f"{size}-{scheme}", folder, url)
                assert not wrong, wrong
                context.close()
        browser.close()
    print(f"all is well; look at {folder}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
