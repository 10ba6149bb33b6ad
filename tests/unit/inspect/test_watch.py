"""The live page: what the server gives to whom, and that it reads each row once."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from samestep.errors import ConfigError, StorageError
from tests.servers import serve
from trainer.inspect import watch as watch_module
from trainer.inspect.plan import plan
from trainer.inspect.watch import Server, watch
from trainer.monitoring import jsonl
from trainer.monitoring.jsonl import JsonlTracker, RowReader, read_rows
from trainer.monitoring.report import Report
from trainer.training.ledger import GENESIS, chain, intact_rows


def start_run(folder: Path, steps: int = 100) -> JsonlTracker:
    """A run's folder as its process writes it: a config, an owner, a start."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"output: x\ntraining: {{steps: {steps}}}\n")
    (folder / "checkpoints" / ".owner").write_text("{}")
    begin(folder, 0)
    return JsonlTracker(folder / "metrics.jsonl")


def begin(folder: Path, step: int) -> None:
    starts = JsonlTracker(folder / "starts.jsonl", resume_step=None)
    starts.log(step, {"devices": "2 x CPU", "nodes": "host"})
    starts.close()


def serving(*folders: Path) -> AbstractContextManager[Server]:
    return serve(Server(Report([str(folder) for folder in folders]), 0))


def get(server: Server, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(
        "GET", f"{urlsplit(server.url).path}{path.removeprefix('/')}", headers=headers
    )
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def run_of(server: Server) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(get(server, "/data")[1])["runs"][0]
    return run


def test_only_the_page_and_its_data_are_served_and_only_to_this_machine(tmp_path: Path):
    start_run(tmp_path / "run").log(10, {"train/loss": 6.0})
    with serving(tmp_path / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        response, page = get(server, "/")
        assert (response.status, "<main>" in page) == (200, True)
        port = server.server_address[1]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9000"):
            assert get(server, "/data", Host=host)[0].status == 200
        # Another user of the machine, who does not know the token.
        root = urlsplit(server.url).path
        for path in ("/", "/data", "/study/0/a", root[:-1], f"{root[:-2]}x/data"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path)
            response = connection.getresponse()
            assert (response.status, b"loss" in response.read()) == (403, False), path
            connection.close()
        # A name elsewhere that was made to point to this machine, and no name at all.
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", ""):
            response, text = get(server, "/data", Host=host)
            assert response.status == 403
            assert "loss" not in text
        for path in ("/config.yaml", "/../config.yaml", "/metrics.jsonl", "//etc/passwd", "/data/"):
            assert get(server, path)[0].status == 404


def test_unchanged_data_are_not_sent_again(tmp_path: Path):
    tracker = start_run(tmp_path / "run")
    tracker.log(10, {"train/loss": 6.0})
    with serving(tmp_path / "run") as server:
        tag = str(get(server, "/data")[0].getheader("ETag"))
        response, text = get(server, "/data", **{"If-None-Match": tag})
        assert (response.status, text) == (304, "")
        tracker.log(20, {"train/loss": 5.0})
        assert get(server, "/data", **{"If-None-Match": tag})[0].status == 200


def test_a_run_that_begins_restarts_fails_and_ends_while_it_is_watched(tmp_path: Path):
    folder = tmp_path / "run"
    with serving(folder) as server:
        assert run_of(server)["status"]["state"] == "waiting"
        tracker = start_run(folder, steps=30)
        assert run_of(server)["status"]["state"] == "starting"
        tracker.log(10, {"train/loss": 6.0, "perf/eta_seconds": 9.0})
        tracker.log(20, {"train/loss": 5.0})
        found = run_of(server)
        assert found["status"]["state"] == "running"
        assert found["series"]["train/loss"]["y"] == [6.0, 5.0]
        # The eta of an earlier row says nothing about now.
        assert found["status"]["eta"] == [None, None, None]
        tracker.alert("ERROR", "The run has failed", "no space")
        assert run_of(server)["status"]["state"] == "failed"
        tracker.close()
        # It goes back to step 10 and on: the row of step 20 is gone, and another one comes.
        begin(folder, 10)
        tracker = JsonlTracker(folder / "metrics.jsonl", resume_step=10)
        tracker.log(20, {"train/loss": 4.0})
        found = run_of(server)
        assert found["status"]["state"] == "running"
        assert found["series"]["train/loss"]["y"] == [6.0, 4.0]
        assert found["summary"]["restarts"] == 1
        assert [fault["text"] for fault in found["faults"]] == ["no space"]
        (folder / "checkpoints" / ".owner").unlink()
        assert run_of(server)["status"]["state"] == "stopped"
        tracker.log(30, {"train/loss": 3.0})
        assert run_of(server)["status"]["state"] == "finished"


def test_a_run_without_rows_for_a_while_is_stalled(tmp_path: Path):
    tracker = start_run(tmp_path / "run")
    rows = [{"step": n, "time": time.time() - 600 + n, "train/loss": 1.0} for n in range(5)]
    tracker.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = tmp_path / "run" / "starts.jsonl"
    starts.write_text(json.dumps({"step": 0, "time": time.time() - 700}) + "\n")
    report = Report([str(tmp_path / "run")])
    assert report.data()["runs"][0]["status"]["state"] == "stalled"
    tracker.log(5, {"train/loss": 1.0})
    assert report.data()["runs"][0]["status"]["state"] == "running"


def test_each_row_is_read_once(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    reader = RowReader(file)
    assert reader.read() == ([], False)
    tracker = JsonlTracker(file)
    for step in range(1, 4):
        tracker.log(step, {"a": 1.0})
    rows, replaced = reader.read()
    assert ([row["step"] for row in rows], replaced) == ([1, 2, 3], False)
    # What was read is not looked at again: here it is overwritten, except for its last line.
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"#" * (len(lines[0]) + len(lines[1])) + lines[2])
    with file.open("ab") as appended:
        appended.write(b'{"step": 4, "time": 1.0}\n{"step": 5, "ti')
    assert [row["step"] for row in reader.read()[0]] == [4]
    with file.open("ab") as appended:
        appended.write(b'me": 1.0}\n')
    assert [row["step"] for row in reader.read()[0]] == [5]


def test_a_line_that_is_being_written_is_read_once_wherever_it_is_cut(tmp_path: Path):
    tracker = JsonlTracker(tmp_path / "whole")
    for step in (1, 2):
        tracker.log(step, {"train/loss": 6.5, "text": "é \u2028 {}"})
    whole = tracker.path.read_bytes()
    ledger = tmp_path / "whole_ledger"
    head, lines = GENESIS, b""
    for step in (1, 2):
        row: dict[str, Any] = {"kind": "fed", "step": step, "time": 0.0, "order": 0}
        row |= {"first_step": step, "examples": [[0, 4]], "digest": "é"}
        row["head"] = head = chain(head, row)
        lines += json.dumps(row).encode() + b"\n"
    ledger.write_bytes(lines)
    for cut in range(len(whole) + 1):
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(whole[:cut])
        reader = RowReader(file)
        rows = reader.read()[0]
        assert len(rows) == whole[:cut].count(b"\n")
        beside = [row["step"] for row in read_rows(file)]
        # A whole object is a row, though its line feed is missing.
        assert beside == [1, 2][: whole[: cut + 1].count(b"\n")]
        with file.open("ab") as appended:
            appended.write(whole[cut:])
        more, replaced = reader.read()
        assert [row["step"] for row in (more if replaced else [*rows, *more])] == [1, 2]
        assert reader.read() == ([], False)
    for cut in range(len(lines) + 1):
        ledger.write_bytes(lines[:cut])
        found = list(intact_rows(ledger))
        assert [row["step"] for row, _ in found] == [1, 2][: lines[:cut].count(b"\n")]


def test_a_huge_file_is_read_in_pieces_and_its_damage_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jsonl, "_PIECE_BYTES", 100)
    run = tmp_path / "run"
    tracker = start_run(run)
    for step in range(1, 51):
        tracker.log(step, {"train/loss": 1.0})
        tracker.alert("WARN", f"title {step}", "")
    with tracker.path.open("ab") as file:
        file.write(1000 * b"no row\n")
    tracker.log(51, {"train/loss": 1.0})
    reader = RowReader(tracker.path)
    sizes = [len(rows) for rows, _ in reader.pieces()]
    assert (sum(sizes), sizes[-1]) == (51, 0)
    assert max(sizes) <= 2
    assert reader.damaged.startswith("metrics.jsonl, line 51: ")
    assert reader.damaged_lines == 1000
    (found,) = Report([str(run)]).data()["runs"]
    assert found["summary"]["step"] == 51
    titles = [each["title"] for each in found["faults"] if each["title"].startswith("title")]
    assert titles == [f"title {step}" for step in range(1, 51)]
    assert any("(1000 in all)" in each["text"] for each in found["faults"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "alerts.jsonl", "ledger.jsonl"])
def test_a_link_in_place_of_a_file_of_the_run_is_not_followed(tmp_path: Path, name: str):
    run = tmp_path / "run"
    start_run(run).log(1, {"train/loss": 1.0})
    other = tmp_path / "other"
    other.write_text("a line of a stranger's choice\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other)
    with pytest.raises(StorageError, match=rf"cannot read .*{name}: it is a link to another file"):
        Report([str(run)]).data()


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET /" + 70000 * b"a" + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + 200 * b"A: b\r\n" + b"\r\n",
        b"GET / HTTP/1.1\r\nA: " + 70000 * b"b" + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: [\r\n\r\n",
    ],
    ids=["path", "headers", "header", "body", "brackets"],
)
def test_requests_beyond_the_limits_get_an_error_at_once(
    tmp_path: Path, request_text: bytes, capsys: pytest.CaptureFixture[str]
):
    with serving(tmp_path) as server:
        place = ("127.0.0.1", int(server.server_address[1]))
        with socket.create_connection(place, 5) as connection:
            connection.sendall(request_text)
            assert re.match(rb"HTTP/1\.[01] (4|501)", connection.recv(100))
        assert get(server, "/")[0].status == 200
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_reader_notices_a_file_that_was_cut_back_and_has_grown_again(tmp_path: Path, kept: int):
    file = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"a": 1.0})
    reader = RowReader(file)
    reader.read()
    again = JsonlTracker(file, resume_step=kept)
    for step in range(kept + 1, 7):
        again.log(step, {"a": 2.0})
    rows, replaced = reader.read()
    assert replaced
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_the_ledger_says_whether_restarts_are_joined(tmp_path: Path):
    run = tmp_path / "run"
    start_run(run).log(30, {"train/loss": 1.0})
    begin(run, 20)
    ledger = JsonlTracker(run / "ledger.jsonl", resume_step=None)
    fed = {"kind": "fed", "order": 0, "examples": [], "digest": "", "head": "ab12"}
    ledger.log(0, {"kind": "order", "order": 0, "head": "ab11"})
    ledger.log(20, {**fed, "first_step": 1})
    report = Report([str(run)])
    ledger.log(30, {**fed, "first_step": 21})
    found = report.data()["runs"][0]["ledger"]
    assert (found["steps"], found["edges"], found["joined"]) == ([[1, 30]], 1, 1)
    begin(run, 30)
    ledger.log(40, {**fed, "first_step": 33})
    ledger.log(
        40, {"kind": "excluded", "order": 0, "examples": [[5, 9]], "reason": "nan", "head": ""}
    )
    described = report.data()["runs"][0]
    found = described["ledger"]
    assert (found["steps"], found["edges"], found["joined"]) == ([[1, 30], [33, 40]], 2, 1)
    assert [fault["text"] for fault in described["faults"]] == ["5 to 8: nan"]


def test_a_suite_shows_its_runs_its_scores_and_when_it_ends(tmp_path: Path):
    suite = tmp_path / "suite"
    suite.mkdir()
    runs = [
        {"task": "rte", "run": f"seed-{i}", "digest": str(i), "folder": f"runs/rte/{i}"}
        | {"score": "accuracy", "steps": 100}
        for i in range(3)
    ]
    (suite / "suite.json").write_text(json.dumps({"slots": 1, "runs": runs}))
    report = Report([str(suite)])
    (found,) = report.data()["suites"]
    assert (found["finished"], found["total"], found["eta"]) == (0, 3, None)
    results = [
        {"digest": str(i), "scores": {"accuracy": score}, "seconds": 50.0}
        for i, score in enumerate((0.5, 0.7))
    ]
    (suite / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    running = start_run(suite / "runs" / "rte" / "2")
    running.log(40, {"train/loss": 1.0})
    (found,) = report.data()["suites"]
    assert found["running"] == [{"task": "rte", "run": "seed-2", "step": 40, "steps": 100}]
    (task,) = found["tasks"]
    assert (task["finished"], task["mean"], task["best"]) == (2, pytest.approx(0.6), 0.7)
    low, middle, high = found["eta"]
    assert low < 30 == middle < high
    diverged = {"digest": "2", "scores": {"accuracy": math.nan}, "seconds": 50.0}
    with (suite / "results.jsonl").open("a") as file:
        file.write(json.dumps(diverged) + "\n")
    with serving(suite) as server:
        ((task,),) = (each["tasks"] for each in json.loads(get(server, "/data")[1])["suites"])
    assert (task["finished"], task["mean"], task["best"]) == (3, None, 0.7)


def test_studies_show_their_jobs_and_link_to_their_pages_and_runs(tmp_path: Path):
    output = tmp_path / "studies"
    with serving(output) as server:
        assert json.loads(get(server, "/data")[1])["studies"] == []
        assert get(server, "/study/0/rates")[0].status == 404
        study = output / "rates"
        study.mkdir(parents=True)
        jobs = [
            {"name": f"{stage}-{i}", "stage": stage, "arms": f"small, seed {i}"}
            | {"folder": f"../jobs/{stage}-{i}", "run": "run"}
            for i in range(2)
            for stage in ("train", "evaluate")
        ]
        plan = {"question": "Which <rate>?", "slots": 1, "jobs": jobs, "running": ["train-1"]}
        (study / "study.json").write_text(json.dumps(plan))
        for job in ("train-0", "evaluate-0"):
            (output / "jobs" / job).mkdir(parents=True)
            result = {"scores": {}, "usage": {"seconds": 50.0}, "flops": 0}
            (output / "jobs" / job / "result.json").write_text(json.dumps(result))
        for i in range(2):
            start_run(output / "jobs" / f"train-{i}" / "run").log(40, {"train/loss": 1.0})

        def shown() -> dict[str, Any]:
            (found,) = json.loads(get(server, "/data")[1])["studies"]
            return dict(found)

        # Without an owner of the folder, what study.json calls running was killed.
        assert shown()["running"] == []
        (output / ".owner").touch()
        found = shown()
        assert (found["finished"], found["total"], found["page"]) == (2, 4, None)
        assert found["running"] == ["train: small, seed 1"]
        assert found["stages"] == [
            {"stage": "train", "finished": 1, "total": 2, "seconds": 50.0},
            {"stage": "evaluate", "finished": 1, "total": 2, "seconds": 50.0},
        ]
        low, middle, high = found["eta"]
        assert low < 100 == middle < high
        assert [(run["run"], run["state"], run["step"]) for run in found["runs"]] == [
            ("train: small, seed 0", "finished", 40),
            ("train: small, seed 1", "running", 40),
        ]
        response, text = get(server, f"/{found['runs'][1]['link']}")
        assert (response.status, '"train/loss"' in text) == (200, True)
        assert "<title>train: small, seed 1 · samestep</title>" in text
        (study / "index.html").write_text("<p>the table</p>")
        assert get(server, f"/{shown()['page']}")[1] == "<p>the table</p>"
        for path in (
            "/study/0/jobs",
            "/study/1/rates",
            "/study/0/rates/evaluate-0",
            "/study/0/rates/..",
            "/study/0/..",
            "/study/0/rates/../jobs/train-0",
            "/study/0/",
            "/study/-1/rates",
        ):
            assert get(server, path)[0].status == 404, path
    # The folder of one study, in a file: which has no links.
    page = tmp_path / "page.html"
    assert watch([str(study)], page, once=True)
    (found,) = Report([str(study)]).data()["studies"]
    assert (found["name"], found["page"], found["runs"][0]["link"]) == ("rates", None, None)
    assert "Which \\u003crate>?" in page.read_text(encoding="utf-8")


SECRET = "token-of-another-file"


def stranger(folder: Path, secret: Path, kind: str, place: str) -> None:
    """A study in a folder of studies that leads elsewhere: at a file of its, or by a job's path."""
    study, job = folder / "cool", folder / "cool" / "train-1"
    start_run(job / "run").log(40, {"train/loss": 1.0})
    job_folder = {"absolute": str(secret.parent / "job"), "dots": "../../victim/job"}
    plan = {"question": "Which is best?", "slots": 1, "running": []}
    plan["jobs"] = [
        {"name": "train-1", "stage": "train", "arms": "a", "run": "run"}
        | {"folder": job_folder.get(kind, "train-1")}
    ]
    files = {
        "study.json": study / "study.json",
        "index.html": study / "index.html",
        "result.json": job / "result.json",
        "metrics.jsonl": job / "run" / "metrics.jsonl",
        "study": study,
        "job": job,
    }
    files["study.json"].write_text(json.dumps(plan))
    files["index.html"].write_text("<script>parent.stolen = 1</script>")
    if kind in job_folder:
        return
    file = files[place]
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        link = {"circle": file, "device": "/dev/zero", "link": secret.parent / place}[kind]
        file.symlink_to(link)


def strangers() -> Iterator[tuple[str, str]]:
    for place in ("study.json", "index.html", "result.json", "metrics.jsonl", "study", "job"):
        for kind in ("link", "circle", "device", "FIFO", "folder"):
            yield kind, place
    yield from (("absolute", "job"), ("dots", "job"))


def test_a_strangers_study_shows_no_file_of_another_folder_and_runs_no_script(tmp_path: Path):
    victim = tmp_path / "victim"
    shown = 0
    for place in ("study", "job"):
        start_run(victim / place / "run").log(31337, {"train/loss": 31337.0})
    for name in ("study.json", "study/study.json"):
        (victim / name).write_text(
            json.dumps({"question": SECRET, "slots": 1, "running": [], "jobs": []})
        )
    for name in ("index.html", "study/index.html"):
        (victim / name).write_text(SECRET)
    for name in ("result.json", "job/result.json"):
        (victim / name).write_text(json.dumps({"usage": {"seconds": 31337.0}}))
    (victim / "metrics.jsonl").write_text('{"step": 31337, "time": 1.0, "train/loss": 31337.0}\n')
    for number, (kind, place) in enumerate(strangers()):
        folder = tmp_path / str(number)
        stranger(folder, victim / "index.html", kind, place)
        with serving(folder) as server:
            response, text = get(server, "/data")
            assert response.status == 200, (kind, place)
            assert SECRET not in text, (kind, place)
            assert "31337" not in re.sub(r'"(time|now|path)":[^,]*', "", text), (kind, place)
            links = re.findall(r'"(?:page|link)":"([^"]*)"', text)
            for link in {*links, "study/0/cool", "study/0/cool/train-1"}:
                response, text = get(server, link)
                assert response.status == (200 if link in links else 404), (kind, place, link)
                assert SECRET not in text, (kind, place)
                if "stolen" in text:
                    shown += 1
                    assert str(response.getheader("Content-Security-Policy")).startswith("sandbox;")
    assert shown > 10


def test_every_answer_tells_the_browser_what_it_may_do(tmp_path: Path):
    stranger(tmp_path / "in", tmp_path, "absolute", "")
    start_run(tmp_path / "run").log(10, {"train/loss": 6.0})
    with serving(tmp_path / "in", tmp_path / "run") as server:
        script = re.findall(r"<script>(.*?)</script>", get(server, "/")[1], flags=re.S)
        digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
        for path, wanted in {
            "/": f"default-src 'none'; script-src 'sha256-{digest}'; ",
            "/data": "default-src 'none'; sandbox; ",
            "/study/0/cool": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img",
            "/nothing": "default-src 'none'; sandbox; ",
        }.items():
            response = get(server, path)[0]
            policy = str(response.getheader("Content-Security-Policy"))
            assert policy.startswith(wanted)
            assert "frame-ancestors 'none'" in policy
            assert not re.search(r"script-src[^;]*unsafe|allow-|https?:|\*", policy)
            for name, value in {
                "Cross-Origin-Resource-Policy": "same-origin",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-store",
            }.items():
                assert response.getheader(name) == value, (path, name)


def test_silent_connections_do_not_keep_the_browser_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch_module, "_MOST_REQUESTS", 4)
    monkeypatch.setattr(watch_module._Handler, "timeout", 60)
    with serving(tmp_path) as server:
        place = ("127.0.0.1", int(server.server_address[1]))
        silent = [socket.create_connection(place, 10) for _ in range(8)]
        assert silent[0].recv(1) == b"", "the oldest is dropped"
        assert get(server, "/")[0].status == 200
        monkeypatch.setattr(watch_module._Handler, "timeout", 0.2)
        silent.append(socket.create_connection(place, 10))
        assert silent[-1].recv(1) == b"", "its time is over"
        for each in silent:
            each.close()


def test_a_closed_tab_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked, closed = Event(), Event()

    def page(server: Server) -> str:
        asked.set()
        assert closed.wait(30)
        return "page"

    monkeypatch.setattr(Server, "page", page)
    with serving(tmp_path) as server:
        server.daemon_threads = False  # so that its end waits for the answer
        with socket.create_connection(("127.0.0.1", int(server.server_address[1]))) as tab:
            page_path = urlsplit(server.url).path.encode()
            tab.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % page_path)
            assert asked.wait(30)
            # Linger for 0 seconds: the connection is reset.
            tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        closed.set()
    assert capsys.readouterr().err == ""


def test_the_last_page_has_the_planned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start_run(tmp_path / "run").log(30, {"train/loss": 1.0})
    monkeypatch.setattr(plan, "memory_of_run", lambda folder: 2.5)
    assert watch([str(tmp_path / "run")], tmp_path / "page.html", once=True)
    assert '"planned_memory_gib":2.5' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_cannot_be_watched_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.touch()
    page = tmp_path / "page.html"
    with pytest.raises(ConfigError, match=r"file is a file\. Name the output folder"):
        watch([str(file)], page)
    with pytest.raises(ConfigError, match=r"is named twice\. Leave one out"):
        watch([str(tmp_path), f"{tmp_path}/"], page)
    with pytest.raises(ConfigError, match="--port is 70000"):
        watch([str(tmp_path)], page, port=70000)
    for output in (tmp_path, file / "page.html"):
        with pytest.raises(ConfigError, match="which cannot be written"):
            watch([str(tmp_path / "never")], output)
    with serving(tmp_path) as server:
        port = int(server.server_address[1])
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used: Address already"):
            watch([str(tmp_path)], page, port=port)
    assert not watch([str(tmp_path / "never")], page, once=True)
    assert "no run has metrics yet; nothing is written" in capsys.readouterr().out
    assert not page.exists()
