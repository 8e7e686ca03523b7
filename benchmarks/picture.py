"""README's picture: the page that `make demo` writes, as a browser shows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BROWSER_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WIDTH, _HEIGHT = 1120, 980


def take(target: Path) -> str:
    """Inspect the default text, open its page, store a picture; say what was done or why not."""
    browser = shutil.which("chromium")
    if browser is None:
        return "Picture: left as it is, since chromium is not installed"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "heads.html"
        subprocess.run(
            [sys.executable, "-m", "multihead", "inspect", "--report", str(page)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        _screenshot(browser, page, target)
    return f"Picture: {target}, {target.stat().st_size // 1024} KiB"


def _screenshot(browser: str, page: Path, target: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=list(_BROWSER_OPTIONS))
        view = chromium.new_page(
            viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light"
        )
        view.goto(page.as_uri())
        view.wait_for_load_state("networkidle")
        view.screenshot(path=target)
        chromium.close()
