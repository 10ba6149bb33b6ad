"""`samestep watch` in a real browser: the page follows a run that is trained beside it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from trainer.monitoring.jsonl import JsonlTracker

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTHS = {"wide": 1280, "phone": 390}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    from selenium.webdriver.chrome.service import Service

    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_follows_runs_and_stays_as_a_file(browser: Any, tmp_path: Path, width: int):
    first, second, page = tmp_path / "first", tmp_path / "second", tmp_path / "out" / "page.html"
    command = [sys.executable, "-m", "trainer.cli", "watch", str(first), str(second)]
    watching = subprocess.Popen(
        [*command, "--port", "0", "--output", str(page)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(4)]
        assert lines[0] == f"{first} does not exist yet; the page waits for it\n"
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]+/", "".join(lines))
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(url)

        def text(selector: str) -> str:
            return str(
                browser.execute_script(
                    "return document.querySelector(arguments[0]).textContent", selector
                )
            )

        assert "waits for" in text("#status")
        row = {"train/tokens": 100, "time/forward": 1.0, "perf/seconds_per_step": 0.1}
        row |= {"perf/eta_seconds": 9000.0, "perf/eta_low_seconds": 8000.0}
        row |= {"perf/eta_high_seconds": 10000.0, "perf/tokens_per_second": 1000.0}
        trackers = []
        for run in (first, second):
            (run / "checkpoints").mkdir(parents=True)
            (run / "checkpoints" / ".owner").touch()
            config = {"output": str(run), "training": {"steps": 100}, "data": {"path": 300 * "x"}}
            (run / "config.yaml").write_text(json.dumps(config))
            trackers.append(JsonlTracker(run / "metrics.jsonl"))
            for step in (1, 2, 3):
                trackers[-1].log(step, {"train/loss": 7.0 - step, **row})
        until(lambda: "step 3 of 100" in text("#status") and "running" in text("#status"), 60)
        assert re.search(r"ends in 2:1\d:\d\d to 2:4\d:\d\d", text("#status"))
        curve = "return document.querySelector('#charts svg').innerHTML"
        before = browser.execute_script(curve)
        assert before.count("<path") == 2  # one for each run

        # A row changes the page in its place: no reload, and the scroll position stays.
        browser.execute_script("window.same = true; window.scrollTo(0, 300)")
        trackers[0].log(50, {"train/loss": 1.25, **row})
        trackers[1].alert("WARN", "A step was skipped", f"the loss is <b>nan</b> {300 * 'y'}")
        until(lambda: "step 50 of 100" in text("#status"), 60)
        until(lambda: "<b>nan</b>" in text("#faults"), 60)
        assert browser.execute_script(curve) != before
        assert browser.execute_script("return [window.same, window.scrollY]") == [True, 300]
        wide = browser.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert wide[1] == width
        assert wide[0] <= wide[1]
        assert browser.get_log("browser") == []

        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 0
        assert watching.stdout.read().strip().endswith(str(page))
        until(lambda: text("#lost").startswith("no answer from samestep watch"), 60)
        browser.get_log("browser")  # Chromium itself logs that nobody answers
        # The file shows the same, without a server.
        browser.get(page.as_uri())
        assert "step 50 of 100" in text("#status")
        assert text("h1") == "Training report"
        assert browser.get_log("browser") == []
    finally:
        watching.kill()
        watching.wait()
