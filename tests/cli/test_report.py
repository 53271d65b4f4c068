"""`taxfree report`, and its page in a browser without a network."""

from __future__ import annotations

import base64
import importlib.util
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select, WebDriverWait

from taxfree_cli.exits import ExitCode
from tests.cli.conftest import Outcome

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
FILES = ("explain/nvidia-h200-x2-large.json", "timeline/nvidia-h200-x2.json")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no browser: apt install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    # A root user's sandbox does not start; small containers have a small /dev/shm.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver


@pytest.fixture
def page(cli: Callable[..., Outcome], tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    results = [part for name in FILES for part in ("--results", RESULTS / name)]
    assert cli("report", "--out", out, *results).code == ExitCode.DONE
    return out


def view(driver: WebDriver, width: int, scheme: str = "light", media: str = "") -> None:
    """Show a page of this width, in light or dark colours, on a screen or on paper."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    send = driver.execute_cdp_cmd  # type: ignore[attr-defined]
    send("Emulation.setDeviceMetricsOverride", size)
    send("Emulation.setEmulatedMedia", {"media": media, "features": features})


def background(driver: Any) -> int:
    """The brightness of the page's corner, 0 to 255."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as image:
        return int(image.convert("L").getpixel((2, 2)))


@needs_browser
def test_the_page_draws_filters_and_answers_the_keyboard(browser: WebDriver, page: Path) -> None:
    """One long test: starting a browser and drawing a page take most of the time."""
    view(browser, 1200)
    browser.get(page.as_uri())
    ready = "return 'ready' in document.documentElement.dataset"
    WebDriverWait(browser, 60).until(lambda each: each.execute_script(ready))

    def marks(figure: str) -> list[Any]:
        return browser.find_elements(By.CSS_SELECTOR, f"#{figure} .role-mark > [aria-label]")

    drawn = [each.get_attribute("id") for each in browser.find_elements(By.TAG_NAME, "figure")]
    assert {"map-flash_decode", "speed-ups", "taxes-bars", "timeline-call"} <= set(drawn)
    assert all(marks(figure) for figure in drawn)
    assert "No trials are at hand" in browser.find_element(By.ID, "studies").text

    # A filter takes cells and rows of tables away, and a figure of which nothing is left.
    cells, shown = len(marks("map-flash_decode")), browser.find_element(By.ID, "shown")
    before = int(shown.text.split()[0])
    for name, value in (("op", "flash_decode"), ("gpus", "8")):
        select = Select(browser.find_element(By.CSS_SELECTOR, f"[data-filter={name}]"))
        select.select_by_visible_text(value)
    WebDriverWait(browser, 20).until(lambda _: 0 < len(marks("map-flash_decode")) < cells)
    assert 0 < int(shown.text.split()[0]) < before
    assert "Nothing here passes" in browser.find_element(By.ID, "map-matmul_all_reduce").text
    table = browser.find_elements(By.CSS_SELECTOR, "#map-flash_decode tbody tr:not([hidden])")
    assert {row.get_attribute("data-gpus") for row in table} == {"8"}

    # A choice of a figure changes what is drawn.
    said = [mark.get_attribute("aria-label") for mark in marks("map-flash_decode")]
    Select(
        browser.find_element(By.CSS_SELECTOR, "#map-flash_decode [data-name=measure]")
    ).select_by_value("dispatch")
    WebDriverWait(browser, 20).until(
        lambda _: said != [each.get_attribute("aria-label") for each in marks("map-flash_decode")]
    )

    # Arrow keys say of each mark what a hover shows.
    drawing = browser.find_element(By.CSS_SELECTOR, "#map-flash_decode .drawing")
    output = browser.find_element(By.CSS_SELECTOR, "#map-flash_decode .said")
    drawing.send_keys(Keys.ARROW_RIGHT)
    first = output.text
    drawing.send_keys(Keys.ARROW_RIGHT)
    assert "times as fast as the library" in first
    assert output.text not in ("", first)
    ActionChains(browser).move_to_element(marks("map-flash_decode")[0]).perform()
    assert "dispatch, us" in browser.find_element(By.ID, "hover").text

    for width in (1200, 400):
        view(browser, width)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
    assert background(browser) > 240
    view(browser, 400, "dark")
    assert background(browser) < 60
    view(browser, 700, "dark", "print")
    assert background(browser) > 240
    assert browser.get_log("browser") == []  # type: ignore[attr-defined]


def test_a_page_loads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "src=" not in text.partition("<script")[0]
    assert '<link rel="stylesheet"' not in text
    assert text.count("<script") == text.count('<script type="application/json"') + 1


def test_a_missing_package_is_named(
    cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "altair" else find(name)
    )
    outcome = cli("report", "--out", tmp_path / "report.html")
    assert outcome.code == ExitCode.FAILED
    assert "altair" in outcome.err
    assert "taxfree[report]" in outcome.err
    assert not (tmp_path / "report.html").exists()
