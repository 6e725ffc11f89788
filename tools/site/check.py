"""Open every page of the site in a headless Chromium, and look at every link.

    python tools/site/check.py build/site [--screenshots FOLDER]
    python tools/site/check.py build/site --links    # without a Chromium

Fails if a page logs an error or asks another host for something, if a picture isn't drawn, or if a
link or an anchor leads nowhere; and if there is no Chromium, unless only links are asked for.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# As Debian and Ubuntu call them; `CHROMIUM` and `CHROMEDRIVER` say where others are.
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
DRIVER = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1300,1000",
)


_UNDRAWN = "return document.querySelector('pre.mermaid') !== null"  # drawn, it is a div
_ASKED = "return performance.getEntriesByType('resource').map(e => e.name)"


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("href", "src") and tag != "base":
                self.links.append(value)
            if name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """Links of the site's pages to files and anchors that aren't there."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or (path.name == "404.html"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{path.name}: {link}")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                found.append(f"{path.name}: {link}: no such anchor")
    return found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing is printed for each request."""


def opened(site: Path, screenshots: Path | None) -> list[str]:
    """What goes wrong when the pages are opened.

    Raises:
        SystemExit: there is no Chromium, or no driver for it.
    """
    if CHROMIUM is None or DRIVER is None:
        raise SystemExit(
            "there is no Chromium, or no driver for it: apt-get install chromium chromium-driver, "
            "set CHROMIUM and CHROMEDRIVER, or look at the links alone (--links)"
        )
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    problems = []
    try:
        for path in sorted(site.rglob("*.html")):
            name = path.relative_to(site).as_posix()
            driver.get(f"http://localhost:{server.server_port}/{name}")
            WebDriverWait(driver, 20).until(lambda d: not d.execute_script(_UNDRAWN))
            log = driver.get_log("browser")
            bad = [e["message"] for e in log if e["level"] in ("SEVERE", "WARNING")]
            urls = driver.execute_script(_ASKED)
            bad += [f"asks {u}" for u in urls if urlsplit(u).hostname not in ("localhost", None)]
            problems += [f"{name}: {problem}" for problem in bad]
            if screenshots is not None:
                screenshots.mkdir(parents=True, exist_ok=True)
                driver.save_screenshot(str(screenshots / f"{path.stem}.png"))
    finally:
        driver.quit()
        server.shutdown()
        server.server_close()
    return problems


def main() -> None:
    """Print what is wrong; the exit status says whether something is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path)
    parser.add_argument("--links", action="store_true", help="open no page")
    options = parser.parse_args()
    site = options.site.resolve()
    problems = dead_links(site)
    if not options.links:
        problems += opened(site, options.screenshots)
    print(*problems, f"{len(list(site.rglob('*.html')))} pages, {len(problems)} problems", sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
